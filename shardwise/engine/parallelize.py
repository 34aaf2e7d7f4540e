"""`sw.parallelize`: checks all arguments, then builds the engine.

A recomputation with a budget, or in arenas, is decided by dry runs of the unsharded model: the
engine keeps a copy of it on the meta device, with the model's own buffers.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shardwise.comm.unchanged import normal_mode
from shardwise.comm.world import World, init
from shardwise.core.layouts.tensor_table import Table
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import require
from shardwise.core.tools.arguments import CHECK_EVERY
from shardwise.engine.batch import Count, Tokens
from shardwise.engine.checks import consistency, validate
from shardwise.engine.checks.device_room import require_chosen
from shardwise.engine.default_fill import default_fill
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer.elementwise import require_possible
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.options import Build, EngineOptions, Loss
from shardwise.engine.rank_zero_weights import missing_weights
from shardwise.observe import meta_pass
from shardwise.observe.work import kernels_of
from shardwise.techniques.data import rerun
from shardwise.techniques.data.apply import layable
from shardwise.techniques.expert.apply import check_experts
from shardwise.techniques.pipeline import stage_module, weight_stashing
from shardwise.techniques.recompute.apply import (
    Foreseen,
    Recomputation,
    on_host,
    recomputed_modules,
)
from shardwise.techniques.tensor import first_step
from shardwise.techniques.tensor.apply import layer_tables, table_for
from shardwise.techniques.tile.apply import tiled_layers
from shardwise.wrap.unwrap import no_wrapper
from shardwise.wrap.wrap_policy import Rule


@normal_mode()
def parallelize(
    model: nn.Module,
    plan: Plan | str,
    world: World | None = None,
    *,
    optimizer: OptimizerSpec | None = None,
    loss: Loss | None = None,
    tokens: Tokens | None = None,
    rows: Count | None = None,
    clip: float | None = None,
    on_nonfinite: str = "raise",
    check_every: int | str = CHECK_EVERY,
    units: Rule = "auto",
    least_unit_bytes: int | None = None,
    prefetch: int = 1,
    fill: Callable[[str, Tensor], Any] | None = None,
    seed: int = 0,
    table: Table | Mapping[str, str] | None = None,
    stages: Sequence[str] | None = None,
    broadcast_buffers: bool = True,
    offload_folder: str | None = None,
) -> Engine:
    """Shard `model` in place according to `plan`, and return the engine that trains it.

    Without a world it is that of `sw.init()`.  The options are those of
    shardwise.engine.options.EngineOptions, where each is described.

    Raises:
        InputError: the plan or an argument cannot work or differs between ranks; nothing changed.
    """
    options = EngineOptions(
        optimizer=optimizer,
        loss=loss,
        tokens=tokens,
        rows=rows,
        clip=clip,
        on_nonfinite=on_nonfinite,
        check_every=check_every,
        units=units,
        least_unit_bytes=least_unit_bytes,
        prefetch=prefetch,
        fill=fill,
        seed=seed,
        table=table,
        stages=stages,
        broadcast_buffers=broadcast_buffers,
        offload_folder=offload_folder,
    )
    return build_engine(model, plan, world, options)


def build_engine(
    model: nn.Module, plan: Plan | str, world: World | None, options: EngineOptions
) -> Engine:
    """The engine; all arguments are checked before anything changes."""
    validate.model(model, "sw.parallelize")
    validate.no_backward_optimizer(model, "sw.parallelize of a model")
    world = init() if world is None else world
    validate.world(world)
    options = options if world.meta else replace(options, kernels=kernels_of(world.device))
    plan = plan_of(plan)
    require(plan, world.size)
    plan = _completed(plan, world)
    model, loss = validate.as_followed(plan, model, options.loss, world.rank)
    options = replace(options, loss=loss)
    spec, objective = options.spec, options.objective
    require_possible(spec, model, plan)
    tokens, rows = validate.tokens(options.tokens), validate.rows(options.rows)
    fill = validate.fill(options.fill, options.seed) or default_fill(model, options.seed)
    _require_shardable_model(model, plan, options.units)
    table = table_for(model, plan, options.table)
    layers = layer_tables(model, plan, options.table)
    calls = stage_module.calls_under(plan, model, objective)
    begin = stage_module.stage_starts(model, plan, options.stages, calls)
    recomputed = recomputation(model, plan, world.rank, options, begin)
    clip = weight_stashing.require(model, plan, begin, options)
    rerun.require(plan, options.checks)
    if world.rank == 0 and not world.dry:
        if options.optimizer is None:
            chosen = "without optimizer=, the optimizer is sw.AdamW(lr=3e-4)"
            print(f"shardwise: {chosen}", file=sys.stderr)
        spec.warn_unmatched([n for n, _ in model.named_parameters(remove_duplicate=False)])
    shared = {"the plan": str(plan), "the model": model}
    shared |= {"the table": table, "the optimizer": spec}
    consistency.require_same(world, shared | options.shared)
    missing = missing_weights(model, world)
    validate.fill_used(options.fill, options.seed, model, missing)
    build = Build(
        plan,
        world.on(plan.mesh),
        replace(options, optimizer=spec, tokens=tokens, rows=rows, clip=clip, fill=None),
        objective,
        fill,
        table,
        starts=begin,
        calls=calls,
        recompute=recomputed,
        layers=layers,
        missing=missing,
    )
    return first_step.engine_of(model, build)


def plan_of(plan: Plan | str) -> Plan:
    return plan if isinstance(plan, Plan) else Plan.parse(plan)


def _completed(plan: Plan, world: World) -> Plan:
    """The plan with its open data axis filled in; rank 0 prints the result if it changed."""
    require_chosen(plan)
    completed = plan.completed(world.size)
    if completed != plan and world.rank == 0:
        print(
            f"shardwise: the plan '{plan}' on {world.size} ranks is '{completed}'", file=sys.stderr
        )
    return completed


def _require_shardable_model(model: nn.Module, plan: Plan, units: Rule) -> None:
    validate.trainable(model)
    validate.no_max_norm(model, plan.data_size * (1 + (plan.precision in ("bf16", "fp16"))))
    no_wrapper(model)
    layable(model, units)
    check_experts(model, plan)
    tiled_layers(model, plan)


# --- recomputation --------------------------------------------------------------------------------


def recomputation(
    model: nn.Module,
    plan: Plan,
    rank: int,
    options: EngineOptions,
    starts: Sequence[str] = (),
) -> Recomputation:
    """The recomputation of a model that is not sharded yet."""
    kinds = recomputed_modules(model, plan, options.units, starts)
    if not plan.recompute_budget_bytes and not (plan.arenas and kinds):
        hosted = on_host(model, plan, options.units, kinds, starts)
        return Recomputation(kinds, hosted=hosted, everything=plan.activations is not None)
    plain = meta_pass.template(model)

    def before(batch: Any) -> Foreseen:
        from shardwise.observe.foreseen import foreseen  # builds an engine

        return foreseen(plain, plan, options, rank, batch)

    return Recomputation(kinds, before)
