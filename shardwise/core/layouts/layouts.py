"""How the ranks of a plan hold each parameter of a model: decided here, and read everywhere else.

The parameter belongs to the layers of one plan, and the techniques add to its layout in turn:

    data       the row of that plan, on its data axes
    tensor     ranges of a dim on `tp`, or a gradient that is summed there, by the styles of modules
    expert     the experts of each rank on `ep`, with `edp` in place of the inner data axis
    pipeline   the ranks of `pp` whose stages use it
    tile       the rows of a tile, on the axis `tile`, all of whose ranks each rank plays
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardwise.core.layouts.layout import I, R
from shardwise.core.layouts.param_layout import AxisLayout, Layout
from shardwise.core.layouts.tensor_table import bias_cut, cuts
from shardwise.core.mesh import EXPERTS, PIPELINE, REST, TENSOR, TILE
from shardwise.core.model_spec import Facts, TensorSpec
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import schedule_of
from shardwise.core.schedule.schedule import Schedule

#: Styles of modules that apply replicated parameters to shards: their gradients are summed.
SUMMED = ("replicated", "sequence")


def layouts(names: Iterable[str], facts: Facts, plan: Plan) -> dict[str, Layout]:
    """The layout of each parameter by its name, which may be a tile's."""
    numbers = range(len(plan.layers) + 1)
    data = [_on_data_axes(plan, number) for number in numbers]
    tensor = {
        number: tensor_layouts(spec, plan.size_of(mesh_axis(TENSOR, number)))
        for number, spec in facts.tensors.items()
    }
    schedule = schedule_of(plan)
    found: dict[str, Layout] = {}
    for name in names:
        plain = facts.plain(name)
        number = plan.layer_of(plain)
        mesh = number if _has_mesh(plan, number) else 0
        layout = data[number]
        if mesh in tensor:
            axis = mesh_axis(TENSOR, mesh)
            layout = layout.also(axis, tensor[mesh].get(plain, AxisLayout(I, plan.size_of(axis))))
        if not mesh:
            layout = _on_experts(layout, facts.experts.get(plain), plan)
        if schedule is not None and facts.stages:
            layout = layout.also(PIPELINE, stage_layout(facts.stages[plain], schedule))
        if name in facts.tiles:
            on = AxisLayout.sharded(facts.tiles[name].cut)
            layout = replace(layout, axes=((TILE, on), *layout.axes))
        found[name] = layout
    return found


def mesh_axis(axis: str, number: int) -> str:
    """The name of an axis in the mesh of the plan `number` of layers; 0: in the model's mesh."""
    return f"{axis}.{number}" if number else axis


def _has_mesh(plan: Plan, number: int) -> bool:
    return number > 0 and plan.layers[number - 1].has_axes


def _on_data_axes(plan: Plan, number: int) -> Layout:
    own, mesh = plan.of_layers(number), number if _has_mesh(plan, number) else 0
    shard, replicate = (
        mesh_axis(axis, mesh) if axis else "none" for axis in (own.shard_axis, own.replicate_axis)
    )
    return Layout(own.states, shard, replicate)


def _on_experts(layout: Layout, on: AxisLayout | None, plan: Plan) -> Layout:
    """The ranks of `ep` are data ranks: a row that shards nothing is replicated on them."""
    if on is None:
        replicated = plan.ep > 1 and not layout.row.sharded
        return layout.also(EXPERTS, AxisLayout(I, plan.ep)) if replicated else layout
    shard, replicate = (
        REST if axis == plan.inner_data_axis else axis for axis in (layout.shard, layout.replicate)
    )
    return replace(layout, shard=shard, replicate=replicate).also(EXPERTS, on)


def stage_layout(stages: Sequence[int], schedule: Schedule) -> AxisLayout:
    holders = tuple(sorted({schedule.home[stage] for stage in stages}))
    return AxisLayout(R, schedule.ranks, holders=holders)


def tensor_layouts(spec: TensorSpec, ranks: int) -> dict[str, AxisLayout]:
    """The layouts on a tensor axis of the parameters that are cut or summed there."""
    found = {**spec.experts}
    for module, style in spec.styles.items():
        shape = spec.modules[module]
        wanted = {
            "weight": cuts(style, shape, spec.table, ranks),
            "bias": bias_cut(style, shape, spec.table, ranks),
        }
        row = style.name.startswith("rowwise") and spec.sp  # its bias is added to shards
        for key, name in spec.params[module].items():
            cut = wanted.get(key)
            if cut is not None:
                found[name] = AxisLayout.sharded(cut)
            elif style.name in SUMMED or (key == "bias" and row):
                found.setdefault(name, AxisLayout(R, ranks))
    return found


def norm_axes(plan: Plan) -> list[tuple[str, ...]]:
    """The axes except `pp` over which squares of gradients are summed, for each plan of layers.
    These are the axes that cut its layouts.  One of the ranks that hold the same part counts it.
    """
    found: list[tuple[str, ...]] = []
    for number in range(len(plan.layers) + 1):
        mesh, layout = _has_mesh(plan, number), _on_data_axes(plan, number)
        axes = () if layout.shard == "none" else (layout.shard,)
        axes += () if mesh or layout.row.sharded else (EXPERTS,)
        found.append((*axes, mesh_axis(TENSOR, number if mesh else 0)))
    return found
