"""The spec of the plain, unsharded model, from two copies of it on the meta device.

One runs a forward and a backward pass (meta_pass.py).  Under a pipeline, the other is partitioned
into stages, and a forward shows what crosses each boundary (techniques/pipeline/trace/tracer.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm.unchanged import kept_values
from shardwise.comm.world import Axis, World
from shardwise.core.layouts.uneven import Counts, Cut
from shardwise.core.mesh import TENSOR
from shardwise.core.model_spec import (
    Bundles,
    ModelPass,
    ModelSpec,
    StageSpec,
    StageTensor,
    TensorSpec,
)
from shardwise.core.plan.plan import Plan
from shardwise.engine.batch import computed_parts, widened
from shardwise.engine.build import facts_of
from shardwise.engine.model_structure import (
    by_shape,
    shapes_of,
    tensor_world,
    valueless,
    without_passes,
)
from shardwise.engine.options import EngineOptions, Loss
from shardwise.engine.precision import DTYPES
from shardwise.observe import meta_pass
from shardwise.observe.work import Kernels
from shardwise.techniques.context.apply import RecordedPositions
from shardwise.techniques.data.apply import Sharding, cast_params, cast_whole, units_of
from shardwise.techniques.data.wrap_policy import UnitSpec
from shardwise.techniques.expert import apply as expert_parallel
from shardwise.techniques.layers.plans import LayerPlans
from shardwise.techniques.layers.recorded import LayerPasses
from shardwise.techniques.pipeline import stage_module
from shardwise.techniques.pipeline.partition import calls_of, candidates, starts
from shardwise.techniques.pipeline.staged_model import Stages
from shardwise.techniques.pipeline.trace.placeholders import Calls, layers, twin
from shardwise.techniques.recompute import apply as recomputation
from shardwise.techniques.recompute.price import FULL
from shardwise.techniques.recompute.price_budget import within_budget
from shardwise.techniques.recompute.word import recompute_budget
from shardwise.techniques.tensor import apply as tensor_parallel
from shardwise.techniques.tensor.tensor_table import Table, cuts
from shardwise.techniques.tile.apply import Tiling, tile

Call = Callable[[nn.Module, Any], Tensor]
#: The plain model, what records a pass of it, a forward, and what adds the tape of a rank's model.
Recording = tuple[nn.Module, Callable[..., ModelPass], Call, Callable[..., ModelPass]]


class StagedLayout(NamedTuple):
    """What a forward in stages needs: the styles, where stages begin, and the calls of modules."""

    table: Table | None
    begin: Sequence[str]
    calls: Calls | None


#: The bundles of each microbatch; what stages read, and what they write, outside of their layers.
StageCuts = tuple[tuple[Bundles, ...], tuple[frozenset[str], ...], tuple[tuple[int, int], ...]]


class ModelStructure(NamedTuple):
    """A spec without passes; the table of styles, plans of layers, and where stages begin."""

    spec: ModelSpec
    table: Table | None
    plans: LayerPlans
    begin: tuple[str, ...]


def model_spec(
    model: nn.Module,
    plan: Plan,
    rank: int,
    batch: Any,
    objective: Loss,
    options: EngineOptions,
) -> ModelSpec:
    """The plain model, with the units, stages and precision of `plan`.
    `rank` matters if tensor ranks have parts of several sizes.
    """
    plain = plain_copy(model, plan)
    parts = computed_parts(batch, plan.microbatches, plan.cut, options.rows)
    context = positions_of(plain, plan, rank, options)
    parts = context.cut(parts)
    call = partial(_call, objective, context, DTYPES[plan.precision])

    def staged(layout: StagedLayout) -> StageCuts:
        made = _Staged(plain, tensor_world(plan, rank), plan.sp, layout)
        bundles = by_shape(parts, lambda part: made.bundles(call, part))
        return bundles, made.outside, made.written

    spec, table, plans, begin = structure(plain, plan, options, staged)
    real = partial(_real, model, plan, options)
    around = context.around if plan.cp > 1 else None
    record, taped = _recorders(plain, real, call, options.kernels, around)
    if plans.meshes:
        passes = LayerPasses(plans, plan, rank, (*begin, *plans.outside(dict(spec.recomputed))))
        rows = list(zip(parts, passes.counts(parts, options.rows), strict=True))
        return _with_meshes(spec, passes, table, (plain, record, call, taped), rows)
    return _with_one_mesh(spec, (plan, rank, table), (plain, record, call, taped), parts)


def positions_of(
    plain: nn.Module, plan: Plan, rank: int, options: EngineOptions
) -> RecordedPositions:
    return RecordedPositions(plain, plan, rank, tokens=options.tokens is not None)


def _call(
    objective: Loss,
    context: RecordedPositions,
    dtype: torch.dtype | None,
    model: nn.Module,
    rows: Any,
) -> Tensor:
    context.enter(rows)
    return objective(model, widened(rows, dtype, model))


def _recorders(
    plain: nn.Module,
    real: Callable[[], nn.Module],
    call: Call,
    kernels: Kernels,
    around: meta_pass.Around | None,
) -> tuple[Callable[..., ModelPass], Callable[..., ModelPass]]:
    """What records a pass of the plain model, and what adds the tape of a rank's model."""
    changed = {} if around is None else {"around": around}
    record = partial(meta_pass.run, plain, real, call, kernels=kernels, **changed)
    return record, partial(meta_pass.with_tape, kernels=kernels, **changed)


def _with_one_mesh(
    spec: ModelSpec,
    under: tuple[Plan, int, Table | None],
    how: Recording,
    parts: Sequence[Any],
) -> ModelSpec:
    (plan, rank, table), (_, record, _, _) = under, how
    if table is not None:
        spec = _with_table(spec, (plan, rank, table), how, parts)
    else:
        runs = by_shape(parts, record)
        moves = tuple(run.moves for run in runs)
        tapes = tuple(run.tape for run in runs) if spec.on_host else ()
        rows = tuple(run.rows for run in runs)
        spec = replace(spec, expert_moves=moves, row_gathers=rows, run=runs[0], tapes=tapes)
        spec = replace(spec, recomputed=recomputed_kinds(spec, plan, dict(spec.recomputed)))
    return spec


def _with_table(
    spec: ModelSpec, under: tuple[Plan, int, Table], how: Recording, parts: Sequence[Any]
) -> ModelSpec:
    (plan, rank, table), (plain, record, call, taped) = under, how
    tensors = spec.tensors
    assert tensors is not None
    heads = _heads(tensors, tensor_world(plan, rank).axis(TENSOR))
    runs = by_shape(parts, lambda part: record(part, heads))

    def on(rank: int, part: Any) -> ModelPass:
        return taped(runs[0], on_tensor_axis(plain, plan, rank, table), call, part)

    every = by_shape(parts if plan.cp > 1 or spec.on_host else parts[:1], partial(on, rank))
    spec = replace(
        spec,
        run=every[0],
        tensors=replace(tensors, runs=runs),
        expert_moves=tuple(run.moves for run in runs),
        row_gathers=tuple(run.rows for run in every),
        tapes=tuple(run.tape for run in every) if spec.on_host else (),
    )
    widest = replace(spec, run=on(0, parts[0])) if recompute_budget(plan.recompute) else spec
    return replace(spec, recomputed=recomputed_kinds(widest, plan, dict(spec.recomputed)))


def _with_meshes(
    spec: ModelSpec,
    passes: LayerPasses,
    table: Table | None,
    how: Recording,
    parts: Sequence[tuple[Any, Counts]],
) -> ModelSpec:
    (plain, record, call, taped), plan, rank = how, passes.plan, passes.rank
    tensors, own = spec.tensors, spec.layers
    heads = {} if tensors is None else _heads(tensors, tensor_world(plan, rank).axis(TENSOR))
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


def _heads(tensors: TensorSpec, axis: Axis) -> dict[str, tuple[Axis, Cut]]:
    """The linear layers whose logits stay sharded over the axis, each with its cut."""
    return {
        name: (axis, cut)
        for name, style in tensors.styles.items()
        if style.name == "vocabulary" and tensors.modules[name].kind == "linear"
        if (cut := cuts(style, tensors.modules[name], tensors.table, axis.size))
    }


def recomputed_kinds(spec: ModelSpec, plan: Plan, kinds: dict[str, str]) -> dict[str, str]:
    """`kinds`, or a budget's choice; under sp inputs are shards, and nothing is partitioned."""
    if plan.sp and plan.partitioned:
        return dict.fromkeys(kinds, FULL)
    budget_bytes = recompute_budget(plan.recompute)
    return within_budget(spec, plan, list(kinds), budget_bytes) if budget_bytes else kinds


class _Staged:
    """A copy of the model on meta, in stages and on the tensor axis of `world`."""

    def __init__(self, plain: nn.Module, world: World, sp: bool, layout: StagedLayout) -> None:
        ours = meta_pass.value_copy(plain)
        whole = twin(ours)
        self.stream = tensor_parallel.lay_out(whole, world, sp, layout.table).stream
        self.names = {id(p): name for name, p in ours.named_parameters()}
        self.outside: tuple[frozenset[str], ...] = ()  # parameters that stages read outside layers
        self.written: tuple[tuple[int, int], ...] = ()  # stage and bytes of buffers outside layers
        every = range(len(layout.begin) + 1)
        device = torch.device("cpu")
        self.stages = Stages(ours, whole, layout.begin, every, device, layout.calls)

    def bundles(self, call: Call, part: Any) -> Bundles:
        """What crosses each stage boundary for one microbatch."""
        self.stream.begin()
        with kept_values(part):
            trace = self.stages.trace(lambda model: call(model, part))
        own = self.stages.layers.own
        self.outside = tuple(
            frozenset(self.names[id(p)] for number, p in own[stage].items() if number in read)
            for stage, read in enumerate(trace.read)
        )
        self.written = tuple((each.stage, each.like.nbytes) for each in trace.outside)
        return tuple(
            tuple(
                StageTensor(math.prod(spec.shape), spec.dtype.itemsize, spec.requires_grad)
                for spec in bundle
            )
            for bundle in trace.bundles
        )


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
    """A copy of a plain model, sharded for `rank` under the styles of `table`; nothing is sent.
    It is on the device of `plain` (meta or CPU).
    """
    on_meta = any(p.is_meta for p in plain.parameters())
    laid_out = (meta_pass.meta_copy if on_meta else meta_pass.value_copy)(plain)
    tensor_parallel.lay_out(laid_out, tensor_world(plan, rank), plan.sp, table)
    return laid_out


def _real(model: nn.Module, plan: Plan, options: EngineOptions) -> nn.Module:
    if any(p.is_meta for p in model.parameters()):
        raise valueless(model)
    copied = meta_pass.value_copy(model)
    cast_whole(copied, DTYPES[plan.precision], torch.device("cpu"))
    tile(copied, plan, options.units).show()
    return copied


def stage_counts(plain: nn.Module, options: EngineOptions) -> Callable[[int], Counts]:
    """Gives the blocks, or else layers, of so many stages. Raises InputError for too few."""
    calls = cache(lambda: calls_of(plain, options.objective))

    @cache
    def of(stages: int) -> Counts:
        cuts = candidates(plain, stages, calls())
        begin = [cuts.index(name) for name in starts(plain, stages, None, calls())]
        return tuple(b - a for a, b in pairwise((0, *begin, len(cuts))))

    return of


def structure(
    plain: nn.Module,
    plan: Plan,
    options: EngineOptions,
    staged: Callable[[StagedLayout], StageCuts],
) -> ModelStructure:
    """The spec of a plain model under a plan, without its passes.
    `staged` gives what crosses stages, if the plan has a pipeline.
    """
    expert_parallel.check_experts(plain, plan)
    table = tensor_parallel.table_for(plain, plan, options.table)
    calls = calls_of(plain, options.objective) if plan.pipeline else None
    begin = stage_module.stage_starts(plain, plan, options.stages, calls)
    at = stage_module.stages_of(plain, begin, calls) if plan.pipeline else {}

    def unit_key(spec: UnitSpec) -> object:
        return {(at.get(name), plan.layer_of(name)) for name, _ in spec.params}

    plans = tensor_parallel.layer_tables(plain, plan, options.table)
    kinds = recomputation.recomputed_modules(plain, plan, options.units, begin)
    hosted = recomputation.on_host(plain, plan, options.units, kinds, begin)
    alone = tuple(plans.alone(plain, options.units))
    tiling = tile(plain, plan, options.units)
    how_sharded = _sharding(plan, options, tiling, alone)
    specs = units_of(plain, how_sharded, plan.mesh.size_of(TENSOR), unit_key)
    units = {spec.name: [name for name, _ in spec.params] for spec in specs}
    facts = facts_of(plain, units, plan, table, plans, at, tiling.params)
    tiling.show()
    cuts = None
    if plan.pipeline:
        within = layers(plain, begin, calls)
        names = {name: layer.stages for layer in within.values() for name in layer.names}
        first = {module: name for name, module in plain.named_modules()}
        parts = {n: names[x] for x in names if (n := first[plain.get_submodule(x)]) not in names}
        cuts = StageSpec(at, names, *staged(StagedLayout(table, begin, calls)), parts)
    spec = replace(
        without_passes(plain, plan, specs, facts, expert_parallel.shapes_of(plain)),
        stages=cuts,
        recomputed=kinds,
        on_host=tuple(hosted),
    )
    return ModelStructure(spec, table, plans, begin)


def _sharding(
    plan: Plan, options: EngineOptions, tiling: Tiling, alone: tuple[str, ...]
) -> Sharding:
    return Sharding(
        row=plan.states,
        shard=Axis("none"),
        replicate=Axis("none"),
        units=options.units,
        bucket_bytes=plan.bucket_bytes,
        least_unit_bytes=options.least_unit_bytes,
        tiling=tiling,
        gathers=plan.gathers,
        alone=alone,
    )
