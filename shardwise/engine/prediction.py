"""`sw.predict`: what a rank holds and sends under a plan, without starting one.

A prediction depends on the shapes of the batch. `Predictor` makes one for each batch of a run and
reuses those of batches with the same shapes, unless the model reads values.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from shardwise.core.arguments import integer
from shardwise.core.errors import bad
from shardwise.core.expert_moves import Loads
from shardwise.core.independent import place, plan_of_expert
from shardwise.core.plan import Plan
from shardwise.core.plan_check import require
from shardwise.engine import validate, weight_stashing
from shardwise.engine.elementwise import require_shardable
from shardwise.engine.model_spec import model_spec, shapes_of
from shardwise.engine.offload_choice import with_offload
from shardwise.engine.parallelize import own_loss, plan_of, settled_options, spec_of
from shardwise.engine.spec import optimizer_shape
from shardwise.engine.stage_module import stage_starts
from shardwise.engine.training import Loss
from shardwise.parallel.redistribute.exchange import Counts
from shardwise.prediction.experts import EVEN
from shardwise.prediction.host import fetched_bytes, kept_bytes
from shardwise.prediction.memory import PLAIN
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.rank_shape import shape_on

#: Shapes of batches whose predictions are kept: the latest.
KEPT: Final = 64


def predict(
    model: nn.Module,
    plan: Plan | str,
    batch: Any,
    *,
    rank: int = 0,
    optimizer: Any = None,
    loss: Loss | None = None,
    **options: Any,
) -> Prediction:
    """The memory and the traffic of `rank` under `plan`; no process is started.

    `model` may be on the meta device; it is not changed. `batch` is this rank's argument of
    `engine.step`; its values are not read, unless the model's order of calls depends on them. The
    options are those of `parallelize`. A plan without a data axis is completed for the fewest ranks
    on which each of its words has an effect. For `offload:auto` the plan of the result has the
    offload that is chosen. A note says if `device_peak` is above the plan's `device_memory`.

    Raises:
        InputError: for a plan that cannot work, a rank that it does not have, options that
            `parallelize` refuses, and a model that does not run on the meta device.
    """
    named = {"rank": rank, "optimizer": optimizer, "loss": loss, **options}

    def of(plan: Plan) -> Prediction:
        return Predictor(model, plan, **named).of(batch)

    plan = plan_of(plan)
    require(plan)
    found = of(with_offload(plan.completed(None), of))
    bound, peak = found.plan.device_memory_bytes, found.device_peak
    if bound is None or peak <= bound:
        return found
    note = (
        f"a step stores {peak:,} bytes on the device, more than device_memory allows "
        f"({bound:,}); offload:auto, offload:param or recompute:full stores less"
    )
    return replace(found, notes=(*found.notes, note))


class Predictor:
    """The predictions of one rank for batches of any shape; the arguments are those of `predict`.

    `model` must not change: pass another copy to `parallelize`. The plan is completed for a world
    of `ranks`. The bytes of layers of experts on the axis `ep` and their activations depend on the
    tokens: `Prediction.in_step` takes the loads of the experts.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | str,
        *,
        rank: int = 0,
        ranks: int | None = None,
        optimizer: Any = None,
        loss: Loss | None = None,
        **options: Any,
    ) -> None:
        validate.model(model, "sw.predict")
        plan = plan_of(plan)
        require(plan)
        integer("rank", rank, 0, 0)
        if ranks is not None:
            integer("ranks", ranks, 1, plan.size)
        self.model, self.rank = model, rank
        self.plan = plan.completed(ranks)
        if not 0 <= rank < self.plan.size:
            allowed = f"0 to {self.plan.size - 1}"
            raise bad(f"rank {rank} of the plan '{self.plan}'", allowed, "rank=0")
        if self.plan.experts:
            self.rank, self.plan = place(self.plan, rank)[1], plan_of_expert(self.plan)
        self.options = settled_options(options)
        validate.rows(self.options["rows"])
        beside = validate.beside(self.options["beside"])
        begin = stage_starts(model, self.plan, self.options["stages"], beside)
        clip, on_nonfinite = self.options["clip"], self.options["on_nonfinite"]
        at = model, self.plan, begin
        self.options["clip"] = weight_stashing.require(*at, clip, beside, on_nonfinite)
        self.spec = spec_of(optimizer)
        require_shardable(self.spec.kind, self.spec.by_group, self.plan)
        self.objective = validate.loss(own_loss if loss is None else loss)
        self.known: dict[object, Prediction] = {}

    def of(
        self,
        batch: Any,
        counts: Sequence[Counts] | None = None,
        loads: Sequence[Loads] = (),
        *,
        whole: bool = False,
    ) -> Prediction:
        """The prediction for a step on `batch`, this rank's share of the global batch.

        `counts` are the rows of all data ranks in each microbatch; None: those of `batch` on each.
        Layers with a mesh of their own depend on them. `loads` are those of the experts in each
        microbatch, on which their activations in host memory depend; even ones if not given.
        `whole`: for `Prediction.in_evaluation`, in which the batch is not divided into
        microbatches.

        Raises InputError for a model that does not run on the meta device.
        """
        whole = whole and self.plan.microbatches > 1
        if loads and self.plan.activations_on_host:
            return self._predicted(batch, counts, whole=whole, loads=loads)
        key = shapes_of(batch), tuple(counts or ()), whole
        if key in self.known:
            return self.known[key]
        found = self._predicted(batch, counts, whole=whole)
        if not found.spec.run.note:
            self.known[key] = found
            if len(self.known) > KEPT:
                del self.known[next(iter(self.known))]
        return found

    def _predicted(
        self,
        batch: Any,
        counts: Sequence[Counts] | None,
        *,
        whole: bool,
        loads: Sequence[Loads] = (),
    ) -> Prediction:
        plan, rank = self.plan, self.rank
        of = batch, self.objective, self.options, counts
        spec = model_spec(self.model, plan, rank, *of, whole=whole, loads=loads)
        shape = shape_on(spec, plan, rank)
        dtypes = [getattr(torch, p.dtype) for p in shape.params if p.trainable]
        return Prediction(
            plan,
            rank,
            shape,
            spec,
            optimizer=optimizer_shape(self.spec, dtypes[0]) if dtypes else PLAIN,
            norm=self.options["clip"] is not None,
            check_every=self.options["check_every"],
            activations=kept_bytes(spec, plan, rank, on_host=False),
            host_activations=kept_bytes(spec, plan, rank, on_host=True),
            fetched=fetched_bytes(spec, plan, rank),
            notes=tuple(filter(None, (spec.run.note, EVEN if plan.ep > 1 else ""))),
        )
