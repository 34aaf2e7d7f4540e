"""Sharding of a model on the tensor axis according to its table.

For every module in the table: its parameters are sharded (or their gradients are summed), its hooks
are set, and its attributes that count heads get this rank's numbers. Everything else is replicated
on all ranks of the axis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from shardwise.comm.world import World
from shardwise.core.errors import refusal
from shardwise.core.layouts.layouts import SUMMED, tensor_layouts
from shardwise.core.layouts.param_layout import AxisLayout, Groups
from shardwise.core.layouts.tensor_table import (
    ModuleShape,
    Style,
    Table,
    assign,
    cuts,
    matches,
    numbers,
    unmatched,
)
from shardwise.core.layouts.uneven import Cut
from shardwise.core.mesh import TENSOR
from shardwise.core.model_spec import TensorSpec
from shardwise.core.plan.plan import Plan
from shardwise.engine.checks.reads import guard_layer
from shardwise.engine.default_fill import agree, cut_to, open_sums
from shardwise.techniques.expert import apply as expert_tensor
from shardwise.techniques.layers.plans import LayerPlans, layer_plans, only
from shardwise.techniques.tensor import linear, rng, sequence
from shardwise.techniques.tensor.sequence import sum_spans
from shardwise.techniques.tensor.sharded_logits import Tensors, nowhere, sharded_logits
from shardwise.techniques.tensor.source import shapes, table_of, without
from shardwise.techniques.tensor.table_check import check

if TYPE_CHECKING:
    from shardwise.engine.options import Build


def table_for(model: nn.Module, plan: Plan, own: Table | Mapping[str, str] | None) -> Table | None:
    """The table of styles of `model` for `plan`; None if the plan has no tensor axis."""
    ranks = plan.mesh.size_of(TENSOR)
    if ranks == 1 and own is None:
        return None
    table = table_of(model, own)  # also checks a table that the plan does not use
    if ranks == 1:
        return None
    if plan.layers:
        table = only(table, layer_plans(model, plan).outside(shapes(model)))
    _require(model, table, plan, f"the {type(model).__name__}")
    if plan.sp:
        expert_tensor.require_gathered(model, matches(table, list(shapes(model)), sp=True))
    return table


def layer_tables(model: nn.Module, plan: Plan, own: Table | Mapping[str, str] | None) -> LayerPlans:
    """The plans of single layers, with the styles of those layers that have a tensor axis."""
    plans = layer_plans(model, plan)
    if all(each.plan.mesh.size_of(TENSOR) == 1 for each in plans.meshes):
        return plans
    table, found = table_of(model, own), list(plans.layers)
    if problems := unmatched(table, list(shapes(model)), sp=False):
        raise refusal(f"the table of the {type(model).__name__}", problems)
    for each in plans.meshes:
        if each.plan.mesh.size_of(TENSOR) > 1:
            part = only(table, [name for name in shapes(model) if each.holds(name)])
            _require(model, part, each.plan, ", ".join(each.modules))
            found[each.number - 1] = replace(each, table=part)
    return LayerPlans(tuple(found))


def _require(model: nn.Module, table: Table, plan: Plan, of: str) -> None:
    if not table.styles:
        raise without(model, f"has a table without a style for {of}")
    if problems := check(table, shapes(model), plan.sp, plan.mesh.size_of(TENSOR)):
        raise refusal(f"the table of {of} under '{plan}'", problems)


def tensor_spec(
    model: nn.Module, table: Table, sp: bool, ranks: int, *, layers: bool = False
) -> TensorSpec:
    """The table's styles and their modules before the cut; none of experts in single `layers`."""
    known, names = shapes(model), {id(p): name for name, p in model.named_parameters()}
    styles, params = assign(table, list(known), sp), dict[str, dict[str, str]]()
    for name, style in styles.items():
        own = model.get_submodule(name).named_parameters(recurse=style.name in SUMMED)
        params[name] = {key: names[id(p)] for key, p in own}
    experts = {} if layers else expert_tensor.layouts_on_tensor_axis(model, ranks, sp=sp)
    own = {name: known[name] for name in styles}
    return TensorSpec(table, sp, styles, own, params, experts)


def applied(model: nn.Module, build: "Build") -> Tensors:
    return lay_out(model, build.world, build.plan.sp, build.table)


def lay_out(
    model: nn.Module, world: World, sp: bool, table: Table | None, layers: Sequence[str] = ()
) -> Tensors:
    """Shard `model` in place on the tensor axis by `table`. With `layers`, other layers, experts
    and torch's default generators do not change.
    """
    axis = world.axis(TENSOR)
    if table is None or axis.size == 1:
        return nowhere()
    for module in [model.get_submodule(name) for name in layers] or [model]:
        agree([*module.parameters(), *module.buffers()], axis, world.device)
    tensors = Tensors(axis, linear.Stream(axis, sp), linear.Stream(axis, split=False))
    spec = tensor_spec(model, table, sp, axis.size, layers=bool(layers))
    found, styles, known = tensor_layouts(spec, axis.size), spec.styles, spec.modules
    random = tensors.random = rng.ShardedRandom(axis, model.modules())
    random.mark_outputs(model, styles, sp)
    gathered = [name for name, style in styles.items() if style.name == "gather"]
    for name, style in styles.items():
        cut = cuts(style, known[name], table, axis.size)
        _hook(model, tensors, name, style, cut, known[name], gathered)
        own = () if style.name in SUMMED else spec.params[name].items()
        if split := [key for key, full in own if full in found and found[full].cut]:
            guard_layer(model.get_submodule(name), split, name)
    for name, changed in numbers(table, styles, shapes(model), axis.rank, axis.size).items():
        for attribute, number in changed.items():
            setattr(model.get_submodule(name), attribute, number)
    _open_sums(model, world, tensors, found)
    cut_to(model, found, axis)
    if not layers:
        expert_tensor.on_tensor_axis(model, axis, tensors.stream, found, sp=sp)
        rng.synchronize(axis, world.device)
    random.mark_inputs(model, styles, sp)
    model.register_forward_hook(tensors.end_forward)
    return tensors


def _open_sums(
    model: nn.Module, world: World, tensors: Tensors, found: Mapping[str, AxisLayout]
) -> None:
    axis, params = tensors.axis, dict(model.named_parameters())
    within = {name: _lines(on.cut) for name, on in found.items() if on.cut}
    every = {groups for on in found.values() if (groups := on.groups)}
    opened = open_sums(world, TENSOR, every | {groups for groups in within.values() if groups})
    tensors.summed = {groups: opened[groups] for groups in every}
    for name, groups in within.items():
        shared, p = found[name].shared(axis.rank), params[name]
        if shared is not None and p.requires_grad:
            p.register_hook(partial(sum_spans, shared.dim, shared.spans, opened[groups]))


def _lines(cut: Cut) -> Groups:
    """Groups of ranks that share a part of a packed weight; empty if none do."""
    lines = [next(iter(cut.common(rank)), (rank,)) for rank in range(cut.ranks)]
    return tuple(dict.fromkeys(lines)) if any(len(line) > 1 for line in lines) else ()


def _hook(
    model: nn.Module,
    tensors: Tensors,
    name: str,
    style: Style,
    cut: Cut | None,
    shape: ModuleShape,
    gathered: Sequence[str],
) -> None:
    """Set the hooks of one module; the last one set runs first, and user hooks run last. The inputs
    of modules in those of `gathered` are there already.
    """
    module = model.get_submodule(name)
    stream = tensors.whole if style.by == "whole" else tensors.stream
    entered = any(name.startswith(f"{outer}.") for outer in gathered)
    match style.name, cut:
        case "vocabulary", Cut() if isinstance(module, nn.Embedding):
            straight = style.by == "sequence" or not stream.split
            sequence.embed(module, tensors.axis, cut, stream.leave if straight else stream.sum)
        case "vocabulary", Cut():
            sequence.change_output(module, lambda y: sharded_logits(y, tensors.axis, cut))
            linear.columns(module, stream, shape.transposed, entered)
        case "colwise", _:
            linear.columns(module, stream, shape.transposed, entered)
        case "colwise_gather_output", Cut():
            sequence.change_output(module, partial(stream.join, cut=cut))
            linear.columns(module, stream, shape.transposed, entered)
        case "rowwise", _:
            sequence.rows(module, stream, linear.is_linear(module))
        case "rowwise_split_input", Cut():
            sequence.change_input(module, partial(stream.take, cut=cut))
            sequence.rows(module, stream, linear.is_linear(module))
        case "gather", _:
            sequence.gather_input(module, stream)
        case "split", _:
            sequence.change_input(module, stream.scatter)
        case "sequence", _ if style.by == "join":
            sequence.change_output(module, stream.unsplit)
        case _:
            pass
