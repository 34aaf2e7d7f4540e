"""Low-rank adapters (LoRA, arXiv 2106.09685) beside layers that a table shards.

peft wraps a linear layer W as y = W x + B A x: `base_layer` is W, `lora_A` and `lora_B` have a
linear layer for each adapter. A table names the wrapper. The layers in it get these styles:

    W          A                      B
    colwise    replicated             colwise               A's output is used for each shard of B
    rowwise    rowwise                replicated            A's outputs are summed

Under sp, A of a colwise layer acts on the gathered sequence for a shard of features, and B of a
rowwise layer on a shard of the sequence: their gradients are summed over the ranks.
"""

from dataclasses import replace

from torch import nn

from shardwise.core.errors import bad
from shardwise.techniques.tensor.styles import Style
from shardwise.techniques.tensor.tensor_table import Table, matching

#: Style of W -> the layer that is sharded as W is; that whose gradients sp sums, and its style.
_ADAPTERS = {
    "colwise": ("lora_B", "lora_A", "replicated"),
    "rowwise": ("lora_A", "lora_B", "sequence"),
}
#: Styles that hold for a wrapper with all that is in it.
_RECURSIVE = ("replicated", "sequence", "whole")


def with_adapters(table: Table, model: nn.Module) -> Table:
    """The table with styles for the layers in wrapped layers, instead of the wrappers.

    Raises InputError for adapters that cannot be sharded.
    """
    wrapped = [name for name, module in model.named_modules() if name and _is_wrapper(module)]
    styles: list[tuple[str, str]] = []
    sequence: list[tuple[str, str]] = []
    kept: list[tuple[str, str]] = []
    for key, style in table.styles:
        found = matching(key, wrapped)
        name = Style.parse(style).name
        if not found or name in _RECURSIVE:
            kept.append((key, style))
            continue
        for each in found:
            _require(model.get_submodule(each), each, style)
        same, summed, under_sp = _ADAPTERS[name]
        key = key.removesuffix("?")
        styles += [(f"{key}.base_layer?", style), (f"{key}.{same}.*?", style)]
        sequence.append((f"{key}.{summed}.*?", under_sp))
        kept.append((key + "?", style))  # layers that the pattern names and that have no adapters
    if not styles:
        return table
    apart = [(name, "whole") for name in wrapped]  # not those that the wrapper itself matches
    return replace(
        table,
        styles=(*styles, *apart, *kept),
        sequence=(*sequence, *table.sequence) if table.sequence else (),
    )


def _is_wrapper(module: nn.Module) -> bool:
    base, adapters = getattr(module, "base_layer", None), getattr(module, "lora_A", None)
    return isinstance(base, nn.Module) and isinstance(adapters, nn.ModuleDict)


def _require(module: nn.Module, name: str, style: str) -> None:
    """Raise InputError unless the adapters of the module can be sharded as its style needs."""
    magnitudes = getattr(module, "lora_magnitude_vector", ())
    if Style.parse(style).name in _ADAPTERS and not len(magnitudes):
        return
    dora = " with use_dora=True, whose norms are of the whole weight" if len(magnitudes) else ""
    raise bad(
        f'tensor parallelism of {name}, of the style "{style}", with adapters of peft{dora}',
        "LoRA of layers that are colwise or rowwise",
        "LoraConfig(use_dora=False)"
        if dora
        else f'target_modules without "{name.rpartition(".")[2]}"',
    )
