"""The spec of the plain, unsharded model.

It uses two copies of the model on the meta device. One runs a forward and a backward pass
(meta_pass.py). Under a pipeline, the other is partitioned into stages, and a forward shows what
crosses each boundary (techniques/pipeline/tracer.py).
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.comm.world import Axis, World, traced
from shardwise.core.errors import bad
from shardwise.core.mesh import TENSOR, Mesh
from shardwise.core.model_spec import (
    Bundles,
    Facts,
    ModelPass,
    ModelShape,
    ModelSpec,
    ParamShape,
    StageSpec,
    StageTensor,
    TensorSpec,
    UnitModules,
    UnitShape,
)
from shardwise.core.plan import Plan
from shardwise.core.uneven import Counts, Cut
from shardwise.engine.batch import computed_parts, widened
from shardwise.engine.build import facts_of
from shardwise.engine.options import EngineOptions
from shardwise.engine.spec import buffer_shapes, dtype_name
from shardwise.engine.training import DTYPES, Loss
from shardwise.observe import meta_pass
from shardwise.techniques.data.apply import Sharding, cast_params, cast_whole, gathers, units_of
from shardwise.techniques.data.wrap_policy import UnitSpec
from shardwise.techniques.expert import apply as expert_parallel
from shardwise.techniques.expert.moves import Loads
from shardwise.techniques.layers.plans import require_units
from shardwise.techniques.layers.recorded import LayerPasses
from shardwise.techniques.pipeline import stage_module
from shardwise.techniques.pipeline.partition import misplaced
from shardwise.techniques.pipeline.placeholders import layers, twin
from shardwise.techniques.pipeline.staged_model import Stages
from shardwise.techniques.recompute import apply as recomputation
from shardwise.techniques.recompute.price import FULL
from shardwise.techniques.recompute.price_budget import within_budget
from shardwise.techniques.recompute.word import PARTITIONED_WORDS, recompute_budget
from shardwise.techniques.tensor import apply as tensor_parallel
from shardwise.techniques.tensor.table import Table, cuts
from shardwise.techniques.tile.apply import Tiling, tile

Call = Callable[[nn.Module, Any], Tensor]
#: The plain model, what records a pass of it, a forward, and what adds the tape of a rank's model.
Recording = tuple[nn.Module, Callable[..., ModelPass], Call, Callable[..., ModelPass]]
V = TypeVar("V")


def model_spec(
    model: nn.Module,
    plan: Plan,
    rank: int,
    batch: Any,
    objective: Loss,
    options: EngineOptions,
    counts: Sequence[Counts] | None = None,
    *,
    whole: bool = False,
    loads: Sequence[Loads] = (),
) -> ModelSpec:
    """The plain model, with the units, stages and precision of `plan`.

    `rank` matters if tensor ranks have parts of several sizes. `counts`: the rows of data ranks in
    each microbatch, for layers with their own mesh. `whole`: the batch is one, to be evaluated.
    `loads`: of the experts in each microbatch, on which the activations in host memory depend.
    """
    plain, dtype = plain_copy(model, plan), DTYPES[plan.precision]
    parts = computed_parts(batch, 1 if whole else plan.microbatches, plan.cut, options.rows)

    def call(model: nn.Module, rows: Any) -> Tensor:
        return objective(model, widened(rows, dtype))

    expert_parallel.check_experts(plain, plan)
    table = tensor_parallel.table_for(plain, plan, options.table)
    beside = options.beside or {}
    begin = stage_module.stage_starts(plain, plan, options.stages, beside)
    at = stage_module.stages_of(plain, begin, beside) if plan.pipeline else {}

    def unit_key(spec: UnitSpec) -> object:
        return {(at.get(name), plan.layer_of(name)) for name, _ in spec.params}

    plans = tensor_parallel.layer_tables(plain, plan, options.table)
    kinds = recomputation.recomputed_modules(plain, plan, options.units, begin)
    hosted = recomputation.on_host(plain, plan, options.units, kinds, begin)
    alone = tuple(plans.alone(plain, options.units))
    how_sharded = _sharding(plan, options, tile(plain, plan, options.units), alone)
    specs = units_of(plain, how_sharded, plan.mesh.size_of(TENSOR), unit_key)
    require_units(specs, plan)
    facts = facts_of(plain, plan, table, plans, at, how_sharded.tiling)
    how_sharded.tiling.show()
    world, stages = _tensor_world(plan, rank), None
    if plan.pipeline:
        within = layers(plain, begin, misplaced(plain) | dict(beside))
        known = {name: layer.stages for layer in within.values() for name in layer.names}
        staged = _Staged(plain, world, plan.sp, table, begin, beside)
        bundles = by_shape(parts, lambda part: staged.bundles(call, part))
        stages = StageSpec(at, known, bundles, staged.outside)
    how = {"stages": stages, "recomputed": kinds, "on_host": tuple(hosted)}
    spec = replace(_without_passes(plain, plan, specs, facts), **how)
    real, kernels = partial(_real, model, plan, options), options.kernels
    record = partial(meta_pass.run, plain, real, call, kernels=kernels)
    taped = partial(meta_pass.with_tape, kernels=kernels)
    if plans.meshes:
        passes = LayerPasses(plans, plan, rank, (*begin, *plans.outside(kinds)))
        rows = list(zip(parts, passes.counts(parts, counts, options.rows), strict=True))
        return _with_meshes(spec, passes, table, (plain, record, call, taped), rows)
    return _with_one_mesh(spec, (plan, rank, table), (plain, record, call, taped), parts, loads)


def _with_one_mesh(
    spec: ModelSpec,
    under: tuple[Plan, int, Table | None],
    how: Recording,
    parts: Sequence[Any],
    loads: Sequence[Loads],
) -> ModelSpec:
    """The spec of a model under a plan, on a rank, perhaps with a table of styles."""
    (plan, rank, table), (plain, record, call, taped) = under, how
    if table is not None:
        spec = _with_table(spec, (plan, rank, table), how, parts)
    else:
        runs = by_shape(parts, record)
        moves = tuple(run.moves for run in runs)
        tapes = tuple(run.tape for run in runs) if spec.on_host else ()
        spec = replace(spec, expert_moves=moves, run=runs[0], tapes=tapes)
        spec = replace(spec, recomputed=_chosen(spec, plan, dict(spec.recomputed)))
    if not (spec.on_host and loads):
        return spec
    every = zip(parts, loads, strict=True)
    passes = [_loaded(spec.run, under, (plain, call, taped), *one) for one in every]
    return replace(spec, run=passes[0], tapes=tuple(run.tape for run in passes))


def _loaded(
    run: ModelPass,
    under: tuple[Plan, int, Table | None],
    how: tuple[nn.Module, Call, Callable[..., ModelPass]],
    part: Any,
    loads: Loads,
) -> ModelPass:
    """`run` with the tape of a microbatch whose experts have these loads."""
    (plan, rank, table), (plain, call, taped) = under, how
    laid_out = on_tensor_axis(plain, plan, rank, table)
    expert_parallel.assume_loads(laid_out, rank, plan, loads)
    return taped(run, laid_out, call, part)


def _with_table(
    spec: ModelSpec,
    under: tuple[Plan, int, Table],
    how: Recording,
    parts: Sequence[Any],
) -> ModelSpec:
    """The spec of a model under a plan, on a rank, with a table of styles."""
    (plan, rank, table), (plain, record, call, taped) = under, how
    tensors = spec.tensors
    assert tensors is not None
    heads = _heads(tensors, _tensor_world(plan, rank).axis(TENSOR))
    runs = by_shape(parts, lambda part: record(part, heads))

    def on(rank: int, part: Any = parts[0]) -> ModelPass:
        laid_out = on_tensor_axis(plain, plan, rank, table)
        return taped(runs[0], laid_out, call, part)

    found: dict[str, Any] = {"tensors": replace(tensors, runs=runs), "run": on(rank)}
    found |= {"expert_moves": tuple(run.moves for run in runs)}
    found |= {"tapes": by_shape(parts, lambda part: on(rank, part).tape) if spec.on_host else ()}
    spec, kinds = replace(spec, **found), dict(spec.recomputed)
    widest = replace(spec, run=on(0)) if recompute_budget(plan.recompute) else spec
    return replace(spec, recomputed=_chosen(widest, plan, kinds))


def _with_meshes(
    spec: ModelSpec,
    passes: LayerPasses,
    table: Table | None,
    how: Recording,
    parts: Sequence[tuple[Any, Counts]],
) -> ModelSpec:
    """The spec of a model with layers that have meshes of their own.

    `parts` are the microbatches, each with the rows of all data ranks.
    """
    (plain, record, call, taped), plan, rank = how, passes.plan, passes.rank
    tensors, own = spec.tensors, spec.layers
    heads = {} if tensors is None else _heads(tensors, _tensor_world(plan, rank).axis(TENSOR))
    for number, of_layers in own.items():
        heads |= _heads(of_layers, passes.axis(number))
    known: dict[Any, ModelPass] = {}
    for part, counts in parts:
        key = shapes_of(part), counts
        if key not in known:
            known[key] = record(part, heads, passes.around(counts))
    runs = tuple(known[shapes_of(part), counts] for part, counts in parts)
    laid_out = passes.lay_out(on_tensor_axis(plain, plan, rank, table))
    part, counts = parts[0]
    return replace(
        spec,
        run=taped(runs[0], laid_out, call, part, passes.around(counts)),
        tensors=tensors and replace(tensors, runs=runs),
        layers={number: replace(of_layers, runs=runs) for number, of_layers in own.items()},
        row_gathers=tuple(run.rows for run in runs),
        expert_moves=tuple(run.moves for run in runs),
    )


def _without_passes(
    plain: nn.Module, plan: Plan, specs: Sequence[UnitSpec], facts: Facts
) -> ModelSpec:
    """What a ModelSpec says of a model without its passes, stages and recomputed modules."""
    return ModelSpec(
        ModelShape(tuple(map(_unit_shape, specs)), buffer_shapes(plain)),
        _modules(plain, specs),
        ModelPass((), ()),
        tensors=facts.tensors.get(0),
        experts=facts.experts,
        arenas=plan.arenas,
        expert_layers=expert_parallel.shapes_of(plain),
        layers={number: own for number, own in facts.tensors.items() if number},
        tiles=facts.tiles,
    )


def _heads(tensors: TensorSpec, axis: Axis) -> dict[str, tuple[Axis, Cut]]:
    """The linear layers whose logits stay sharded over the axis, each with its cut."""
    return {
        name: (axis, cut)
        for name, style in tensors.styles.items()
        if style.name == "vocabulary" and tensors.modules[name].kind == "linear"
        if (cut := cuts(style, tensors.modules[name], tensors.table, axis.size))
    }


def _chosen(spec: ModelSpec, plan: Plan, kinds: dict[str, str]) -> dict[str, str]:
    """`kinds`, or under a budget the choice for these modules.

    Under sequence parallelism inputs are already shards, and nothing is partitioned.
    """
    if plan.sp and plan.recompute in PARTITIONED_WORDS:
        return dict.fromkeys(kinds, FULL)
    budget_bytes = recompute_budget(plan.recompute)
    return within_budget(spec, plan, list(kinds), budget_bytes) if budget_bytes else kinds


def _tensor_world(plan: Plan, rank: int) -> World:
    """The ranks of the tensor axis around `rank`, in a world that moves nothing."""
    ranks = plan.mesh.size_of(TENSOR)
    place = plan.mesh.coordinate(rank).get(TENSOR, 0)
    return traced(place, ranks).on(Mesh(((TENSOR, ranks),)))


def by_shape(parts: Sequence[Any], make: Callable[[Any], V]) -> tuple[V, ...]:
    """The result of `make` for each microbatch; computed once for equal shapes."""
    known: dict[Any, V] = {}
    for part in parts:
        if shapes_of(part) not in known:
            known[shapes_of(part)] = make(part)
    return tuple(known[shapes_of(part)] for part in parts)


class _Staged:
    """A copy of the model on meta, in stages and on the tensor axis of `world`."""

    def __init__(
        self,
        plain: nn.Module,
        world: World,
        sp: bool,
        table: Table | None,
        begin: Sequence[str],
        beside: dict[str, str],
    ) -> None:
        ours = copy.deepcopy(plain)
        whole = twin(ours)
        self.stream = tensor_parallel.lay_out(whole, world, sp, table).stream
        self.names = {id(p): name for name, p in ours.named_parameters()}
        self.outside: tuple[frozenset[str], ...] = ()  # parameters that stages read outside layers
        every = range(len(begin) + 1)
        self.stages = Stages(ours, whole, begin, every, torch.device("cpu"), beside)

    def bundles(self, call: Call, part: Any) -> Bundles:
        """What crosses each stage boundary for one microbatch."""
        self.stream.begin()
        trace = self.stages.trace(lambda model: call(model, part))
        own = self.stages.layers.own
        self.outside = tuple(
            frozenset(self.names[id(p)] for number, p in own[stage].items() if number in read)
            for stage, read in enumerate(trace.read)
        )
        return tuple(
            tuple(
                StageTensor(math.prod(spec.shape), spec.dtype.itemsize, spec.requires_grad)
                for spec in bundle
            )
            for bundle in trace.bundles
        )


def shapes_of(part: Any) -> tuple[Any, ...]:
    """The shapes and the element types of the tensors in a batch."""
    return tuple((x.shape, x.dtype) for x in tree_leaves(part) if isinstance(x, Tensor))


def plain_copy(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of the model on meta in the precision of the plan, as `cast_whole` sets it."""
    twin, dtype = meta_pass.meta_copy(model), DTYPES[plan.precision]
    if dtype is not None:
        cast_params(twin, dtype)
    for b in twin.buffers():
        if dtype is torch.float64 and b.is_floating_point():
            b.data = b.data.double()
    return twin


def on_tensor_axis(plain: nn.Module, plan: Plan, rank: int, table: Table | None) -> nn.Module:
    """A copy of a plain model, sharded for `rank` under the styles of `table`.

    It is on the device of `plain` (meta or CPU); nothing is sent.
    """
    on_meta = any(p.is_meta for p in plain.parameters())
    laid_out = meta_pass.meta_copy(plain) if on_meta else copy.deepcopy(plain)
    tensor_parallel.lay_out(laid_out, _tensor_world(plan, rank), plan.sp, table)
    return laid_out


def _real(model: nn.Module, plan: Plan, options: EngineOptions) -> nn.Module:
    """A copy of the plain model with values, for a forward that reads them."""
    if any(p.is_meta for p in model.parameters()):
        raise _valueless(model)
    copied = copy.deepcopy(model)
    cast_whole(copied, DTYPES[plan.precision], torch.device("cpu"))
    tile(copied, plan, options.units).show()
    return copied


def _valueless(model: nn.Module) -> Exception:
    return bad(
        f"a {type(model).__name__} on the meta device whose forward reads values",
        "a model that computes tensors from tensors, or one with its weights",
        "the model built on the CPU",
    )


def _sharding(
    plan: Plan, options: EngineOptions, tiling: Tiling, alone: tuple[str, ...]
) -> Sharding:
    """The values that the choice of units depends on, which exclude the axes."""
    return Sharding(
        row=plan.states,
        shard=Axis("none"),
        replicate=Axis("none"),
        units=options.units,
        bucket_bytes=plan.bucket_bytes,
        least_unit_bytes=options.least_unit_bytes,
        tiling=tiling,
        gathers=gathers(plan),
        alone=alone,
    )


def _unit_shape(spec: UnitSpec) -> UnitShape:
    params = (
        ParamShape(name, tuple(p.shape), dtype_name(p.dtype), p.requires_grad)
        for name, p in spec.params
    )
    return UnitShape(spec.name, tuple(params))


def _modules(model: nn.Module, specs: Sequence[UnitSpec]) -> tuple[UnitModules, ...]:
    names = {module: name for name, module in model.named_modules()}
    found: list[UnitModules] = []
    for spec in specs:
        inside = {m for module in spec.modules for m in module.modules()}
        others = [m for other in specs if other is not spec for m in other.modules]
        found.append(
            UnitModules(
                tuple(names[module] for module in spec.modules),
                any(m in inside for m in others),
                all(type(module) is nn.Embedding for module in spec.modules),
            )
        )
    return tuple(found)
