"""`sw.predict`: what a rank holds and sends under a plan, without starting one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

from torch import Tensor, nn

from shardwise.core.layouts.tensor_table import Table
from shardwise.core.mesh import PIPELINE
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import require
from shardwise.core.schedule.library import updates
from shardwise.core.tools.arguments import CHECK_EVERY, integer
from shardwise.core.tools.tree import leaves
from shardwise.engine.batch import Count, Tokens, rows
from shardwise.engine.checks import validate
from shardwise.engine.checks.device_room import with_offload
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.options import EngineOptions, Loss
from shardwise.engine.parallelize import plan_of
from shardwise.observe.work import Kernels
from shardwise.prediction.prediction import DryStep, Prediction
from shardwise.wrap.wrap_policy import Rule

#: The note on a prediction of experts on ranks.
EVEN: Final = (
    "the bytes on the axis ep and the activations are those of an even load of the experts: they "
    "depend on the routing of tokens"
)


def predict(
    model: nn.Module,
    plan: Plan | str,
    batch: Any,
    *,
    rank: int = 0,
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
    table: Table | Mapping[str, str] | None = None,
    stages: Sequence[str] | None = None,
    broadcast_buffers: bool = True,
    device: Kernels = "cpu",
) -> Prediction:
    """The memory and the traffic of `rank` under `plan`; no process is started.

    `model` may be on the meta device; it is not changed. `batch` is this rank's argument of
    `engine.step`; its values are not read, unless the model's order of calls depends on them. The
    options are those of `parallelize`. `device` is "cpu" or "cuda", neither of which is needed:
    their kernels save other tensors for the backward pass. A plan without a data axis is completed
    for the fewest ranks on which each of its words has an effect. For `offload:auto` the plan of
    the result has the offload that is chosen. A note says if `device_peak` is above the plan's
    `device_memory`.

    Raises:
        InputError: for a plan that cannot work, a rank that it does not have, options that
            `parallelize` refuses, and a model that does not run on the meta device.
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
        table=table,
        stages=stages,
        broadcast_buffers=broadcast_buffers,
        kernels=device,
    )
    return predict_with(model, plan, batch, options, rank)


def predict_with(
    model: nn.Module, plan: Plan | str, batch: Any, options: EngineOptions, rank: int = 0
) -> Prediction:
    """The prediction, with the options of an engine."""

    def of(plan: Plan) -> Prediction:
        with validate.sharded(plan, alone):
            found = predict_rank(model, plan, batch, options, rank=rank)
            assert found.dry_step  # whose errors are those of this call
            return found

    def alone() -> None:
        plain = replace(options, table=None, stages=None)
        assert predict_rank(model, "dp1", batch, plain).dry_step

    plan = plan_of(plan)
    found = of(with_offload(plan.completed(None), of))
    bound = found.plan.device_memory_bytes
    if bound is None or (peak := found.device_peak) <= bound:
        return found
    note = (
        f"a step stores {peak:,} bytes on the device, more than device_memory allows "
        f"({bound:,}); offload:auto, offload:param or recompute:full stores less"
    )
    return replace(found, told=(*found.told, note))


def predict_rank(
    model: nn.Module,
    plan: Plan | str,
    batch: Any,
    options: EngineOptions,
    *,
    rank: int = 0,
    ranks: int | None = None,
) -> Prediction:
    """The prediction for a step on `batch`, this rank's share of the global batch, under the plan
    that is completed for a world of `ranks`.

    Its dry run is made when it is first read, and raises InputError for a model that does not run.
    `model` must not change: pass another copy to `parallelize`.
    """
    validate.model(model, "sw.predict")
    plan = plan_of(plan)
    require(plan)
    if ranks is not None:
        integer("ranks", ranks, 1, plan.size)
    plan = plan.completed(ranks)
    integer("rank", rank, 0, 0, plan.size - 1)
    if options.tokens is None:
        rows(batch, validate.rows(options.rows))  # raises InputError, as a step does
    texts = (x for x in leaves(batch, Tensor, objects=True) if x.dim() == 2)
    first = next((x.numel() for x in texts if not x.is_floating_point()), 0)
    by_stage = updates(plan.pipeline, plan.mesh.size_of(PIPELINE))

    def dry(plan: Plan, rank: int, *, brief: bool = False) -> DryStep:
        from shardwise.observe.dry_engine import dry_step  # builds an engine, which predicts

        return dry_step(model, plan, batch, options, rank, brief=brief)

    return Prediction(
        plan,
        rank,
        norm=options.clip is not None and not by_stage,
        tokens=first * plan.shares,
        told=(EVEN,) if plan.ep > 1 else (),
        dry=cache(dry),
    )
