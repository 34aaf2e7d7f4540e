"""The source of a model's table of tensor parallelism, and the shapes of the model's modules.

The table is, in this order: the argument `table=`; the model's attribute `tensor_table`; the plan
in the configuration of a transformers model (hf_tables.py). A part of a larger model can have a
table too.

Adapters of peft beside layers that a table shards are LoRA (arXiv 2106.09685) and trained copies.
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
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import InputError, bad
from shardwise.core.layouts.tensor_table import (
    Entries,
    ModuleShape,
    Style,
    Table,
    by_pattern,
    last,
    matching,
)
from shardwise.techniques.tensor.hf_tables import own_plan


def table_of(model: nn.Module, table: Table | Mapping[str, str] | None = None) -> Table:
    """The argument `table` (a dict has the heads of the model's own table), or that own table."""
    if not isinstance(table, Table):
        own = own_table(model)
        if table is None and own is None:
            raise without(model, "has no table of styles")
        heads = (own.heads, own.kv_heads) if own else (None, None)
        table = Table.of(table, *heads) if table is not None else own
    assert table is not None
    return with_adapters(table, model)


def own_table(model: nn.Module) -> Table | None:
    """The table that a model, or a part of it, has itself; None without one."""
    found = (table.under(name) for name, part in model.named_modules() if (table := _own(part)))
    return next(found, None)


def shapes(model: nn.Module) -> dict[str, ModuleShape]:
    """The shapes of all modules inside the model, by name; works on the meta device."""
    holders: dict[int, str] = {}
    found: dict[str, ModuleShape] = {}
    for name, module in model.named_modules():
        if not name:
            continue
        shape = _shape(module)
        weight = getattr(module, "weight", None)
        tied = ""
        if shape.kind != "other" and isinstance(weight, torch.Tensor):
            holder = holders.setdefault(id(weight), name)
            tied = "" if holder == name else holder
        found[name] = replace(shape, tied=tied)
    return found


def _shape(module: nn.Module) -> ModuleShape:
    kind = type(module).__name__
    own = dict(module.named_parameters(recurse=False))
    sizes = {parameter.shape for parameter in own.values()}
    common: dict[str, Any] = {
        "bias": getattr(module, "bias", None) is not None,
        "parameters": bool(own),
        "type_name": kind,
        "numbers": tuple(
            (key, value)
            for key, value in vars(module).items()
            if type(value) is int and not key.startswith("_")
        ),
        "own": tuple(own),
    }
    weight = getattr(module, "weight", None)
    if weight is not None and "weight" not in own:  # weight_norm, spectral_norm, parametrizations
        made: dict[str, Any] = common | {"type_name": f"{kind}, whose weight is made from others"}
        return ModuleShape("other", 0, 0, **made)
    if isinstance(module, nn.Embedding):
        return ModuleShape("embedding", module.num_embeddings, module.embedding_dim, **common)
    # the output layer of nn.MultiheadAttention is read by it and never called
    if isinstance(module, nn.Linear) and kind != "NonDynamicallyQuantizableLinear":
        return ModuleShape("linear", module.in_features, module.out_features, **common)
    if kind == "Conv1D" and isinstance(weight, torch.Tensor) and weight.ndim == 2:  # transformers'
        inputs, outputs = weight.shape
        return ModuleShape("linear", inputs, outputs, transposed=True, **common)
    length = next(iter(sizes)) if len(sizes) == 1 else ()
    return ModuleShape("other", length[0] if len(length) == 1 else 0, **common)


def _own(module: nn.Module) -> Table | None:
    table = getattr(module, "tensor_table", None)
    if table is None:
        return own_plan(module)
    return table if isinstance(table, Table) else Table.of(table)


def without(model: nn.Module, why: str) -> InputError:
    """The error for a model without a table."""
    return bad(
        f"tensor parallelism of a {type(model).__name__}, which {why}",
        "table=, the attribute tensor_table, or a tensor plan of transformers",
        "table=sw.derive_table(model, batch, ranks=2, loss=loss).table, or shardwise table MODEL",
    )


# --- adapters of peft -----------------------------------------------------------------------------

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
    own = by_pattern(summed, modules).items(), by_pattern(styles, modules).items()
    return tuple(own[0]), (*own[1], *kept)


def _copies(module: nn.Module) -> tuple[str, ...]:
    """The names of the wrapped layer and of its trained copies; nothing for other modules."""
    own = module._modules
    if isinstance(own.get("lora_A"), nn.ModuleDict) and "base_layer" in own:
        return ("base_layer",)
    if isinstance(copies := own.get("modules_to_save"), nn.ModuleDict) and "original_module" in own:
        return ("original_module", *(f"modules_to_save.{key}" for key in copies))
    return ()


def _require(module: nn.Module, name: str, style: str) -> None:
    if len(getattr(module, "lora_magnitude_vector", ())):
        raise bad(
            f'{name}, of the style "{style}", with adapters of use_dora=True',
            "LoRA without norms of a weight",
            "LoraConfig(use_dora=False)",
        )
    if "base_layer" in module._modules and style == "vocabulary:sequence":
        raise bad(
            f'adapters of the embedding {name}, whose style is "{style}"',
            "adapters of an embedding whose output is not sharded along the sequence",
            f'target_modules without "{last(name)}", or a plan without sp',
        )
