"""The spec of the plain, unsharded model, from two copies of it on the meta device.

One runs a forward and a backward pass (meta_pass.py).  Under a pipeline, the other is partitioned
into stages, and a forward shows what crosses each boundary (techniques/pipeline/trace/tracer.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm.unchanged import kept_values
from shardwise.comm.world import Axis, World
from shardwise.core.layouts.uneven import Counts
from shardwise.core.mesh import TENSOR
from shardwise.core.model_spec import (
    ModelSpec,
    StageSpec,
)
from shardwise.core.plan.plan import Plan
from shardwise.engine.batch import computed_parts, widened
from shardwise.engine.build import facts_of
from shardwise.engine.model_structure import (
    tensor_world,
    valueless,
    without_passes,
)
from shardwise.engine.options import EngineOptions, Loss
from shardwise.engine.precision import DTYPES
from shardwise.observe import meta_pass
from shardwise.techniques.context.apply import RecordedPositions
from shardwise.techniques.data.apply import Sharding, cast_params, cast_whole, units_of
from shardwise.techniques.data.wrap_policy import UnitSpec
from shardwise.techniques.expert import apply as expert_parallel
from shardwise.techniques.pipeline import stage_module
from shardwise.techniques.pipeline.partition import calls_of, candidates, starts
from shardwise.techniques.pipeline.staged_model import Stages
from shardwise.techniques.pipeline.trace.placeholders import Calls, layers, twin
from shardwise.techniques.recompute import apply as recomputation
from shardwise.techniques.recompute.price import FULL
from shardwise.techniques.recompute.price_budget import within_budget
from shardwise.techniques.recompute.word import recompute_budget
from shardwise.techniques.tensor import apply as tensor_parallel
from shardwise.techniques.tensor.tensor_table import Table
from shardwise.techniques.tile.apply import Tiling, tile

Call = Callable[[nn.Module, Any], Tensor]


class StagedLayout(NamedTuple):
    """What a forward in stages needs: the styles, where stages begin, and the calls of modules."""

    table: Table | None
    begin: Sequence[str]
    calls: Calls | None


#: Whether a gradient comes back across each boundary, and what stages read outside of their layers.
StageCuts = tuple[tuple[bool, ...], tuple[frozenset[str], ...]]


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
    part, *_ = context.cut(parts)
    call = partial(_call, objective, context, DTYPES[plan.precision])

    def staged(layout: StagedLayout) -> StageCuts:
        return _Staged(plain, tensor_world(plan, rank), plan.sp, layout).cuts(call, part)

    spec, table = structure(plain, plan, options, staged)
    around = {"around": context.around} if plan.cp > 1 else {}
    real, kernels = partial(_real, model, plan, options), options.kernels
    run = meta_pass.run(plain, real, call, part, kernels=kernels, **around)

    def on(rank: int) -> ModelSpec:
        laid_out = on_tensor_axis(plain, plan, rank, table)
        own = meta_pass.with_tape(run, laid_out, call, part, kernels=kernels, **around)
        return replace(spec, run=own)

    spec = replace(spec, run=run) if table is None else on(rank)
    widest = on(0) if table is not None and recompute_budget(plan.recompute) else spec
    return replace(spec, recomputed=recomputed_kinds(widest, plan, dict(spec.recomputed)))


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
        every = range(len(layout.begin) + 1)
        device = torch.device("cpu")
        self.stages = Stages(ours, whole, layout.begin, every, device, layout.calls)

    def cuts(self, call: Call, part: Any) -> StageCuts:
        """Whether a gradient crosses each boundary, and the parameters read outside of layers."""
        self.stream.begin()
        with kept_values(part):
            trace = self.stages.trace(lambda model: call(model, part))
        own = self.stages.layers.own
        outside = tuple(
            frozenset(self.names[id(p)] for number, p in own[stage].items() if number in read)
            for stage, read in enumerate(trace.read)
        )
        graded = (any(spec.requires_grad for spec in bundle) for bundle in trace.bundles)
        return tuple(graded), outside


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
) -> tuple[ModelSpec, Table | None]:
    """The spec of a plain model under a plan, without its passes, and the table of styles.
    `staged` gives what stages read and what crosses their boundaries, if the plan has a pipeline.
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
        without_passes(plain, specs, facts, expert_parallel.shapes_of(plain)),
        stages=cuts,
        recomputed=kinds,
    )
    return spec, table


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
