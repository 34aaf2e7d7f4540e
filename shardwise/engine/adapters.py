"""Adapters of peft beside layers that a table shards: LoRA (arXiv 2106.09685), trained copies.

LoRA wraps a linear layer W as y = W x + B A x: `base_layer` is W, `lora_A` and `lora_B` have a
linear layer for each adapter. A table names the wrapper. The layers in it get these styles:

    W                      A             B
    colwise                replicated    colwise                 A's output is used for each shard
    colwise_gather_output  replicated    colwise_gather_output   the same; a vocabulary becomes this
    rowwise                rowwise       replicated              A's outputs are summed
    rowwise_split_input    as W          replicated              the same

Under sp, A of a colwise layer acts on the gathered sequence for a shard of features, and B of a
rowwise layer on a shard of the sequence: their gradients are summed over the ranks.

The adapters of an embedding are replicated.  `modules_to_save` wraps a layer of any style: the
original and its trained copies have that style.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from shardwise.core.errors import bad
from shardwise.techniques.tensor.tensor_table import Entries, Style, Table, general, last, matching

_GATHERED = "colwise_gather_output"
#: Style of W -> the layer that is sharded as W is; that whose gradients sp sums, and its style.
_ADAPTERS = {
    "colwise": ("lora_B", "lora_A", "replicated"),
    _GATHERED: ("lora_B", "lora_A", "replicated"),
    "rowwise": ("lora_A", "lora_B", "sequence"),
    "rowwise_split_input": ("lora_A", "lora_B", "sequence"),
}


def with_adapters(table: Table, model: nn.Module) -> Table:
    """The table with styles for the layers in wrapped layers, instead of the wrappers.
    Raises InputError for adapters that cannot be sharded.
    """
    modules = dict(model.named_modules())
    if not any(map(_copies, modules.values())):
        return table
    summed, styles = _expanded(table.styles, modules)
    _, sequence = _expanded(table.sequence, modules)
    return replace(table, styles=styles, sequence=summed + sequence if table.sequence else ())


def _expanded(entries: Entries, modules: Mapping[str, nn.Module]) -> tuple[Entries, Entries]:
    """The styles that sp sums in wrapped layers; and all entries, with wrapped layers first."""
    summed: dict[str, str] = {}
    styles: dict[str, str] = {}
    for name, module in ((name, m) for name, m in modules.items() if name and _copies(m)):
        style = next((style for key, style in entries if matching(key, [name])), "whole")
        kind = Style.parse(style).name
        if kind not in _ADAPTERS and kind != "vocabulary":
            continue  # it holds for all that is in the wrapper
        base, *copies = _copies(module)
        _require(module, name, style)
        if not copies and not isinstance(getattr(module, base), nn.Embedding):
            style = _GATHERED if kind == "vocabulary" else style
            same, partial, under_sp = _ADAPTERS[Style.parse(style).name]
            adapters = dict(module.get_submodule("lora_A").named_children())
            copies = [f"{same}.{key}" for key in adapters]
            summed |= {f"{name}.{partial}.{key}": under_sp for key in adapters}
        styles |= {f"{name}.{key}": style for key in (base, *copies)} | {name: "whole"}
    kept = ((f"{key.removesuffix('?')}?", style) for key, style in entries)
    return _by_pattern(summed, modules), (*_by_pattern(styles, modules), *kept)


def _by_pattern(styles: Mapping[str, str], modules: Mapping[str, nn.Module]) -> Entries:
    """The styles, in one entry for all layers where a pattern matches modules of one style."""
    patterns = dict.fromkeys(map(general, styles))
    alike = {p for p in patterns if len({styles.get(n) for n in matching(p, modules)}) == 1}
    found = {general(n) if general(n) in alike else n: style for n, style in styles.items()}
    return tuple(found.items())


def _copies(module: nn.Module) -> tuple[str, ...]:
    """The names of the wrapped layer and of its trained copies; nothing for other modules."""
    own = module._modules
    if isinstance(own.get("lora_A"), nn.ModuleDict) and "base_layer" in own:
        return ("base_layer",)
    if isinstance(copies := own.get("modules_to_save"), nn.ModuleDict) and "original_module" in own:
        return ("original_module", *(f"modules_to_save.{key}" for key in copies))
    return ()


def _require(module: nn.Module, name: str, style: str) -> None:
    """Raise InputError for adapters that need a whole weight, or a whole sequence."""
    if len(getattr(module, "lora_magnitude_vector", ())):
        raise bad(
            f'tensor parallelism of {name}, of the style "{style}", with adapters of peft with '
            "use_dora=True, whose norms are of the whole weight",
            "LoRA without norms of a weight",
            "LoraConfig(use_dora=False)",
        )
    if "base_layer" in module._modules and style == "vocabulary:sequence":
        raise bad(
            f'adapters of the embedding {name}, whose style is "{style}"',
            "adapters of an embedding whose output is not sharded along the sequence",
            f'target_modules without "{last(name)}", or a plan without sp',
        )
