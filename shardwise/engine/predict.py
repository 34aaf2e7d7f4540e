"""`sw.predict`: what a rank holds and sends under a plan, without starting one.

A prediction depends on the shapes of the batch.  `Predictor` makes one for each batch of a run and
reuses it for batches with the same shapes, unless the model reads values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

from torch import nn

from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import require
from shardwise.core.tools.arguments import CHECK_EVERY, integer
from shardwise.engine.batch import Count, rows
from shardwise.engine.checks import hint, validate
from shardwise.engine.checks.device_room import with_offload
from shardwise.engine.model_structure import shapes_of
from shardwise.engine.optimizer.elementwise import require_possible, require_whole
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.options import EngineOptions, Loss
from shardwise.engine.parallelize import plan_of
from shardwise.engine.spec_of_model import model_spec
from shardwise.observe.work import Kernels
from shardwise.prediction.flat_groups import layout_of
from shardwise.prediction.prediction import DryStep, Prediction
from shardwise.prediction.rank_shape import shape_on
from shardwise.techniques.data import rerun
from shardwise.techniques.data.wrap_policy import Rule
from shardwise.techniques.pipeline import weight_stashing
from shardwise.techniques.pipeline.stage_module import calls_under, stage_starts
from shardwise.techniques.tensor.tensor_table import Table

#: The note on a prediction of experts on ranks.
EVEN: Final = (
    "the bytes on the axis ep and the activations are those of an even load of the experts: they "
    "depend on the routing of tokens"
)
#: Shapes of batches whose predictions are kept: the latest.
KEPT: Final = 64


def predict(
    model: nn.Module,
    plan: Plan | str,
    batch: Any,
    *,
    rank: int = 0,
    optimizer: OptimizerSpec | None = None,
    loss: Loss | None = None,
    tokens: Count | None = None,
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
    found = predict_with(model, plan, batch, options, rank)
    assert found.dry_step  # whose errors are those of this call
    return found


def predict_with(
    model: nn.Module, plan: Plan | str, batch: Any, options: EngineOptions, rank: int = 0
) -> Prediction:
    """The prediction, with the options of an engine; its dry run is made when it is first read."""

    def of(plan: Plan) -> Prediction:
        with hint.sharded(plan, alone):
            return Predictor(model, plan, options, rank=rank).of(batch)

    def alone() -> None:
        Predictor(model, "dp1", replace(options, table=None, stages=None)).of(batch)

    plan = plan_of(plan)
    found = of(with_offload(plan.completed(None), of))
    bound = found.plan.device_memory_bytes
    if bound is None or (peak := found.device_peak) <= bound:
        return found
    note = (
        f"a step stores {peak:,} bytes on the device, more than device_memory allows "
        f"({bound:,}); offload:auto, offload:param or recompute:full stores less"
    )
    return replace(found, notes=(*found.notes, note))


class Predictor:
    """The predictions of one rank for batches of any shape.

    `model` must not change: pass another copy to `parallelize`.  The plan is completed for a world
    of `ranks`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | str,
        options: EngineOptions | None = None,
        *,
        rank: int = 0,
        ranks: int | None = None,
    ) -> None:
        validate.model(model, "sw.predict")
        plan, options = plan_of(plan), options or EngineOptions()
        require(plan)
        if ranks is not None:
            integer("ranks", ranks, 1, plan.size)
        self.model, self.rank = model, rank
        self.plan = plan.completed(ranks)
        integer("rank", rank, 0, 0, self.plan.size - 1)
        validate.rows(options.rows)
        calls = calls_under(self.plan, model, options.objective)
        begin = stage_starts(model, self.plan, options.stages, calls)
        clip = weight_stashing.require(model, self.plan, begin, options)
        rerun.require(self.plan, options.checks)
        self.options = replace(options, clip=clip)
        self.spec, self.objective = options.spec, options.objective
        require_possible(self.spec, model, self.plan)
        self.known: dict[object, Prediction] = {}

    def of(self, batch: Any) -> Prediction:
        """The prediction for a step on `batch`, this rank's share of the global batch.
        Raises InputError for a model that does not run on the meta device.
        """
        if self.options.tokens is None:
            rows(batch, self.options.rows)  # raises InputError, as a step does
        key = shapes_of(batch)
        if key in self.known:
            return self.known[key]
        found = self._predicted(batch)
        if not found.spec.run.note:
            self.known[key] = found
            if len(self.known) > KEPT:
                del self.known[next(iter(self.known))]
        return found

    def _predicted(self, batch: Any) -> Prediction:
        plan, rank = self.plan, self.rank
        spec = model_spec(self.model, plan, rank, batch, self.objective, self.options)
        shape = shape_on(spec, plan, rank)
        trained = [(p.name, len(p.shape), layout_of(plan, p)) for p in shape.params if p.trainable]
        require_whole(self.spec, trained)
        return Prediction(
            plan,
            rank,
            shape,
            spec,
            norm=self.options.clip is not None,
            notes=tuple(filter(None, (spec.run.note, EVEN if plan.ep > 1 else ""))),
            dry=cache(partial(self._dry_step, batch)),
        )

    def _dry_step(self, batch: Any, plan: Plan, rank: int) -> DryStep:
        from shardwise.observe.dry_engine import dry_step  # builds an engine, which predicts

        return dry_step(self.model, plan, batch, self.options, rank)
