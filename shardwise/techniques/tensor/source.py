"""The source of a model's table of tensor parallelism, and the shapes of the model's modules.

The table is, in this order: the argument `table=`; the model's attribute `tensor_table`; the plan
in the configuration of a transformers model (hf_tables.py). A part of a larger model can have a
table too.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import InputError, bad
from shardwise.engine.adapters import with_adapters
from shardwise.techniques.tensor.hf_tables import own_plan
from shardwise.techniques.tensor.tensor_table import ModuleShape, Table


def table_of(model: nn.Module, table: Table | Mapping[str, str] | None = None) -> Table:
    """The argument `table` (a dict has the heads of the model's own table), or that own table."""
    return with_adapters(_table_of(model, table), model)


def _table_of(model: nn.Module, table: Table | Mapping[str, str] | None) -> Table:
    if isinstance(table, Table):
        return table
    own = own_table(model)
    if table is not None:
        heads = (own.heads, own.kv_heads) if own else (None, None)
        return Table.of(table, *heads)
    if own is None:
        raise without(model, "has no table of styles")
    return own


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
        "a table passed as table= (verify: --table FILE), a model with the attribute tensor_table, "
        "a model of transformers that has a tensor plan, or one that is derived; see "
        "docs/how-to/tables.md",
        "table=sw.derive_table(model, batch, ranks=2, loss=loss).table, or shardwise table MODEL",
    )
