"""The inputs of a proof besides the plan: units, a table, and a model without dropout."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from shardwise.core.errors import InputError, bad, read_text
from shardwise.core.layouts.tensor_table import Table
from shardwise.core.plan.plan import Plan
from shardwise.engine.options import Rule
from shardwise.models.trainable import Trainable
from shardwise.observe.work import Kernels

#: Keys that a file may have in addition to its styles, as in Table.of.
BESIDE: Final = ("heads", "kv_heads", "sequence", "sets", "derived")
EXAMPLE: Final = '"blocks.*.up" = "colwise" and "blocks.*.down" = "rowwise", one a line (TOML)'


@dataclass(frozen=True)
class Options:
    """The options of parallelize besides the plan. Each block is a unit, also in small models,
    unless the plan has a bucket. `kernels`: the device's. `batches` selects another set.
    """

    units: Rule = "auto"
    table: Table | Mapping[str, str] | None = None
    kernels: Kernels = "cpu"
    batches: int = 0


def table_in(path: Path, option: str = "--table") -> Table:
    """The table in a TOML or JSON file of styles, which `option` named. Raises InputError."""
    try:
        text = read_text(path)
        read = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise bad(f"{option} {path} ({error})", "a TOML or JSON file of styles", EXAMPLE) from None
    if not isinstance(read, dict) or not read:
        raise bad(f"{option} {path}, which has no styles", "patterns and their styles", EXAMPLE)
    try:
        return _table(read)
    except InputError as error:
        raise InputError(f"In {path}: {error}") from None


def _table(read: dict[str, Any]) -> Table:
    if "styles" not in read or not isinstance(read["styles"], dict):
        nested = next((name for name, style in read.items() if isinstance(style, dict)), None)
        if nested is not None:
            allowed = "names in quotes where they have dots; heads and sequence beside [styles]"
            raise bad(f"the name {nested} that holds other names", allowed, EXAMPLE)
        return Table.of(read)
    unknown = [name for name in read if name not in ("styles", *BESIDE)]
    if unknown:
        raise bad(f"{unknown[0]} beside styles", ", ".join(BESIDE), "a file of styles alone")
    return Table.of(**read)


# --- modules that a plan does not compute as one process does: batch norm and dropout -------------
# A proof of a model with batch norm fails under a plan that divides the batch, and the report says
# why. A proof sets dropout to 0 on both sides of the comparison, and the report says so.

NAMED = 3  # modules of each kind that are named


def batch_norm_note(model: nn.Module, plan: Plan) -> str:
    """Why a plan that divides the batch cannot match one process, and what to prove then; or ""."""
    norms = [name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if not norms or plan.shares * plan.microbatches == 1:
        return ""
    rows = "each rank's own rows" if plan.pipeline is None else "each microbatch's rows"
    return (
        f"This model cannot match one process under a plan that divides the batch: it has batch "
        f"norm ({_listed(norms)}), whose statistics in training are of {rows}, not of the whole "
        "batch. To prove the rest, build it with GroupNorm or LayerNorm in place of batch norm; or "
        "prove a plan without data ranks and microbatches, such as tp2."
    )


def dropout_note(model: nn.Module) -> str:
    """The note on changes of the model by a proof; "" if none."""
    drops = [name for name, m in model.named_modules() if m.training and any(_rates(m))]
    if not drops:
        return ""
    return (
        f"Dropout ({_listed(drops)}) was set to 0 on both sides of the comparison: its masks "
        "depend on the plan."
    )


def without_dropout(trainable: Trainable) -> Trainable:
    """The same model with every rate of dropout set to 0."""

    def make() -> nn.Module:
        model = trainable.make()
        for module in model.modules():
            for name in _rates(module):
                setattr(module, name, 0.0)
        return model

    return replace(trainable, make=make)


def _rates(module: nn.Module) -> Iterator[str]:
    for name, value in vars(module).items():
        is_rate = "drop" in name or (name == "p" and isinstance(module, _DropoutNd))
        if is_rate and isinstance(value, float) and value > 0:
            yield name


def _listed(names: list[str]) -> str:
    named = ", ".join(name or "the model itself" for name in names[:NAMED])
    return f"{named} and {len(names) - NAMED} more" if len(names) > NAMED else named
