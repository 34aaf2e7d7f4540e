"""The table of a run: its own, the model's own, or one that is derived."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from shardwise.core.plan.plan import Plan
from shardwise.derive.table import derive_table
from shardwise.engine.training import Loss
from shardwise.techniques.tensor.source import own_table
from shardwise.techniques.tensor.tensor_table import Table


def table_or_derived(
    table: Table | Mapping[str, str] | None,
    plan: Plan,
    model: Callable[[], nn.Module],
    batch: Callable[[], Any],
    loss: Loss,
) -> Table | Mapping[str, str] | None:
    """The given table; else a derived one, if the plan needs one and the model has none.

    None: the plan has no tensor axis, or the model has its own table.
    Raises InputError if no layer of the model can be sharded.
    """
    ranks = plan.tensor_degrees[-1]
    if ranks == 1 or table is not None:
        return table
    made = model()
    return None if own_table(made) else derive_table(made, batch(), ranks, loss, sp=plan.sp).table
