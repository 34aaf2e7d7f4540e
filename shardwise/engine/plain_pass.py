"""The tape of one microbatch of the plain, unsharded model, from which recomputation is chosen.

A copy of it on the meta device, on the rank's positions and its parts of the tensor axis, runs a
forward pass (meta_pass.py).
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.world import traced
from shardwise.core.errors import InputError, bad
from shardwise.core.layouts.uneven import Counts
from shardwise.core.mesh import TENSOR, Mesh
from shardwise.core.model_spec import PlainPass, Tape
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.tree import leaves
from shardwise.engine.batch import computed_parts, widened
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.options import EngineOptions, Loss
from shardwise.engine.precision import DTYPES
from shardwise.observe import meta_pass
from shardwise.techniques.context.apply import RecordedPositions
from shardwise.techniques.data.apply import cast_params
from shardwise.techniques.expert import apply as expert_parallel
from shardwise.techniques.pipeline import stage_module
from shardwise.techniques.pipeline.partition import calls_of, candidates, starts
from shardwise.techniques.pipeline.trace.placeholders import layers
from shardwise.techniques.recompute import apply as recomputation
from shardwise.techniques.recompute.price import FULL, within_budget
from shardwise.techniques.recompute.word import recompute_budget
from shardwise.techniques.tensor import apply as tensor_parallel
from shardwise.techniques.tensor.tensor_table import Table
from shardwise.techniques.tile.apply import tile


def plain_pass(
    model: nn.Module,
    plan: Plan,
    rank: int,
    batch: Any,
    objective: Loss,
    options: EngineOptions,
) -> PlainPass:
    """A pass of a microbatch of `batch`, with the modules that `plan` recomputes: for a budget its
    choice, the same on all ranks of the tensor axis, whose parts may have several sizes.
    """
    plain, budget_bytes = plain_copy(model, plan), recompute_budget(plan.recompute)
    parts = computed_parts(batch, plan.microbatches, plan.cut, options.rows)
    table = tensor_parallel.table_for(plain, plan, options.table)
    calls = calls_of(plain, options.objective) if plan.pipeline else None
    begin = stage_module.stage_starts(plain, plan, options.stages, calls)
    kinds = recomputation.recomputed_modules(plain, plan, options.units, begin)
    experts = tuple(expert_parallel.shapes_of(plain))
    staged = layers(plain, begin, calls).values() if plan.pipeline else ()
    at = {name: layer.stages for layer in staged for name in layer.names}
    tile(plain, plan, options.units).show()
    context = RecordedPositions(plain, plan, rank, tokens=options.tokens is not None)
    part, *_ = context.cut(parts)
    call = partial(_call, objective, context, DTYPES[plan.precision])

    def tape(of: nn.Module) -> Tape:
        return meta_pass.tape_of(of, call, part, context.around, kernels=options.kernels)

    def passed(rank: int) -> PlainPass:
        with suppress(*meta_pass.UNKNOWN):
            return whole._replace(tape=tape(on_tensor_axis(plain, plan, rank, table)))
        return whole

    try:
        whole = PlainPass(tape(plain), len(begin) + 1, at, kinds, experts)
    except meta_pass.UNKNOWN as error:
        if isinstance(error, InputError):
            raise
        raise valueless(model) from error
    found = whole if table is None else passed(rank)
    if plan.sp and plan.partitioned:  # inputs are shards, and nothing is partitioned
        kinds = dict.fromkeys(kinds, FULL)
    if budget_bytes:
        widest = found if table is None else passed(0)
        kinds = within_budget(widest, plan, list(kinds), budget_bytes)
    return found._replace(recomputed=kinds)


def _call(
    objective: Loss,
    context: RecordedPositions,
    dtype: torch.dtype | None,
    model: nn.Module,
    rows: Any,
) -> Tensor:
    context.enter(rows)
    return objective(model, widened(rows, dtype, model))


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
    ranks = plan.mesh.size_of(TENSOR)
    place = plan.mesh.coordinate(rank).get(TENSOR, 0)
    world = traced(place, ranks).on(Mesh(((TENSOR, ranks),)))
    tensor_parallel.lay_out(laid_out, world, plan.sp, table)
    return laid_out


def stage_counts(plain: nn.Module, options: EngineOptions) -> Callable[[int], Counts]:
    """Gives the blocks, or else layers, of so many stages. Raises InputError for too few."""
    calls = cache(lambda: calls_of(plain, options.objective))

    @cache
    def of(stages: int) -> Counts:
        cuts = candidates(plain, stages, calls())
        begin = [cuts.index(name) for name in starts(plain, stages, None, calls())]
        return tuple(b - a for a, b in pairwise((0, *begin, len(cuts))))

    return of


def shapes_of(part: Any) -> tuple[Any, ...]:
    return tuple((x.shape, x.dtype) for x in leaves(part, Tensor, objects=True))


def valueless(model: nn.Module) -> Exception:
    return bad(
        f"a {type(model).__name__} on the meta device whose forward reads values",
        "a model that computes tensors from tensors, or one with its weights",
        "the model built on the CPU",
    )


def state_tensors(spec: OptimizerSpec) -> int:
    """The optimizer states of the size of a parameter, of the first group."""
    state = spec.first_state(0, (2, 3), torch.float32).values()
    return sum(isinstance(x, Tensor) and x.shape == (2, 3) for x in state)
