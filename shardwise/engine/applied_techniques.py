"""The techniques that an engine applies to its model, in this order.  A new one is one line here.

The data technique, which makes flat parameters of what these leave, and the pipeline, which is an
executor, stand in build.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from torch import nn

from shardwise.core.applied import Applied
from shardwise.core.mesh import TENSOR
from shardwise.core.model_spec import Facts, TiledParam
from shardwise.core.plan.plan import Plan
from shardwise.engine.training import Build
from shardwise.techniques.context import apply as context
from shardwise.techniques.expert import apply as expert
from shardwise.techniques.layers import apply as layers
from shardwise.techniques.layers.plans import LayerPlans, require_units
from shardwise.techniques.recompute import apply as recompute
from shardwise.techniques.tensor import apply as tensor
from shardwise.techniques.tensor.tensor_table import Table

#: Each changes the model in place, and is called by all ranks.
APPLY: Final[tuple[Callable[[nn.Module, Build], Applied], ...]] = (
    tensor.applied,
    expert.applied,
    layers.applied,
    recompute.applied,
    context.applied,
)


def facts_of(
    model: nn.Module,
    units: Mapping[str, Sequence[str]],
    plan: Plan,
    table: Table | None,
    layers: LayerPlans,
    at: Mapping[str, tuple[int, ...]],
    tiles: Mapping[str, TiledParam],
) -> Facts:
    """What the layouts of a model's parameters follow from, before it is cut.

    `units` are the names of the parameters of each unit, `tiles` those of tiles, `at` the stages of
    each parameter; none without a pipeline.  Raises InputError for a unit of layers with different
    plans.
    """
    require_units(units, plan)
    tables = {0: (table, plan)} | {each.number: (each.table, each.plan) for each in layers.meshes}
    tensors = {
        number: tensor.tensor_spec(model, of, own.sp, own.mesh.size_of(TENSOR), layers=number > 0)
        for number, (of, own) in tables.items()
        if of is not None
    }
    return Facts(tensors, expert.layouts_of(model, plan.ep), at, tiles)
