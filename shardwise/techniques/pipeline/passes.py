"""The passes of a step: microbatches run through the stages of one rank (stage_work.py executes the
actions of the schedule).

    one stage    F0.0  B0.0  F0.1  B0.1  ...  REDUCE:0: hooks on the model and its root gather, free
                 and reduce units meanwhile (techniques/data/unit_hooks.py)
    a pipeline   every rank of the axis has the full microbatch; ranks send each other only the
                 values that later stages use. Every rank computes their shapes on meta, once for
                 each shape of microbatch, so no shapes are sent.

In a pipeline each step, microbatch, stage and share of the data has its own random seed, so stages
draw different dropout masks, which do not depend on the rank that has the stage.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm.unchanged import eval_mode, seeded
from shardwise.comm.world import Axis
from shardwise.core.applied import Applied, during
from shardwise.core.errors import RunError
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.schedule import Action, Schedule
from shardwise.engine.batch import Count, copied, enough, is_written
from shardwise.engine.checks.as_before import as_before
from shardwise.engine.checks.guard import Guard
from shardwise.engine.optimizer.norm import LossWeights
from shardwise.engine.optimizer.optimizer import ShardedOptimizer
from shardwise.techniques.data.rerun import Objective, Rerun
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.data.units import Products
from shardwise.techniques.pipeline.runtime import Watch, forward_only, open_channels, run
from shardwise.techniques.pipeline.stage_io import StageTrace
from shardwise.techniques.pipeline.stage_module import Staging
from shardwise.techniques.pipeline.stage_work import (
    NOTHING_CROSSES,
    Microbatch,
    Result,
    ScaledLoss,
    StageWork,
    WholeModel,
)
from shardwise.techniques.pipeline.trace.outside_buffers import ByShape
from shardwise.techniques.pipeline.trace.probe import ActivationProbe
from shardwise.techniques.pipeline.weight_stashing import Stale
from shardwise.techniques.tensor.linear import Stream
from shardwise.techniques.tensor.sharded_logits import Tensors


class _Traced(NamedTuple):
    """The trace of a forward, and the lengths of its sharded sequences. `trains`: whether the loss
    depends on a trained parameter; `written`: whether it writes the batch.
    """

    trace: StageTrace
    lengths: Mapping[int, int]
    trains: bool = False
    written: bool = False


@lru_cache(maxsize=16)
def one_stage(microbatches: int) -> Schedule:
    row = [Action(op, 0, i) for i in range(microbatches) for op in ("F", "B")]
    return lower(Schedule((tuple(row),), (0,), microbatches))


class Passes:
    """The passes of an engine; without `staging` the model is the only stage.

    stale    the versions of weights, if the schedule updates each stage
    trains   whether a loss of the step is computed from parameters that train; None if only the
             gradients show it
    """

    def __init__(
        self,
        model: nn.Module,
        units: "EngineUnits",
        objective: Objective,
        rerun_every: int,
        optimizer: ShardedOptimizer,
        guard: Guard,
    ) -> None:
        staging, data = units.staging, units.data
        self.model, self.units, self.staging, self.data = model, units, staging, data
        self.objective, self.device = objective, data.consensus.device
        self.watch: Watch | None = None
        self.stale: Stale | None = None
        self.trains: bool | None = None
        self.known = ByShape[_Traced]()
        self.interrupted = False  # whether a run has begun and not ended
        self.rerun = Rerun(data, rerun_every, self.device)
        self.schedule, self.axis = one_stage(1), Axis("none")
        self.stages = WholeModel(model, self.device)
        if staging is not None:
            self.schedule, self.axis, self.stages = staging.schedule, staging.axis, staging.stages
            open_channels(self.schedule, self.axis, self.device)
            if self.schedule.update:
                self.stale = Stale(staging, data, optimizer, guard)
        self.microbatches = self.schedule.microbatches

    def require(self, batch: Any, microbatches: int, count: Count | None) -> None:
        if self.staging is not None:
            enough(batch, microbatches, count)

    def shared(self, names: Sequence[str], used: Tensor) -> Tensor:
        return used if self.staging is None else self.staging.shared(names, used)

    def leave_out(self) -> bool:
        """End a step without its update; return whether some stages have already updated."""
        self.interrupted |= self.stale is not None
        return self.stale is not None

    def run(self, parts: Sequence[Any], counts: Sequence[float], weights: LossWeights) -> Tensor:
        """Run all microbatches forward and backward; the last one sums gradients over the ranks.
        `parts` are microbatches, `counts` their tokens.  Returns the double sum of loss * tokens,
        zero on a rank without the last stage.
        """

        def again(part: Any, tokens: float, objective: Objective) -> object:
            return self._run([part], [tokens], weights, objective, last=False)

        objective = self.rerun.begin(self.objective, parts[0], counts[0], again)
        return self._run(parts, counts, weights, objective)

    def _run(
        self,
        parts: Sequence[Any],
        counts: Sequence[float],
        weights: LossWeights,
        objective: Objective,
        *,
        last: bool = True,
    ) -> Tensor:
        loss, data = ScaledLoss(weights, self.device), self.data
        if self.staging is None:
            pairs = enumerate(zip(parts, counts, strict=True))
            microbatches = [Microbatch(index, part, tokens) for index, (part, tokens) in pairs]
            units = replace(self.units, last=len(parts) - 1 if last else None)
            work = StageWork(self.stages, units, loss, objective, microbatches)
            run(one_stage(len(parts)), self.axis, work, self.watch)
            return loss.summed
        seed, self.trains = _seed(data.consensus.axes), False
        for first in range(0, len(parts), self.microbatches):
            these = range(first, first + self.microbatches)
            microbatches = [
                self._microbatch(self.staging, k, parts[k], counts[k], seed) for k in these
            ]
            units = replace(self.units, weights=weights, versions=self.stale, postponed={})
            work = StageWork(self.stages, units, loss, objective, microbatches)
            data.sync = these.stop == len(parts)
            data.order.begin_run()
            with self._whole_run(), self.stale.running() if self.stale else nullcontext():
                run(self.schedule, self.axis, work, self.watch)
            self._end(microbatches)
        if self.stale is None:
            data.reduce_last()
        for flat in () if self.trains else data.consensus.trained:
            flat.grads.has_grad = [False] * len(flat.params)  # earlier stages received zeros
        return loss.summed

    def _microbatch(
        self, staging: Staging, number: int, part: Any, tokens: float, seed: int
    ) -> Microbatch:
        size = self.schedule.update
        place, update = number % self.microbatches, number // size if size else 0
        traced = self._trace(staging, part)
        self.trains = self.trains or traced.trains
        of = traced.trace, traced.lengths, seed + 1_000_003 * number, traced.written
        return Microbatch(place, part, tokens, update, *of)

    @contextmanager
    def _whole_run(self) -> Iterator[None]:
        """The context of a run. Raises RunError after an interrupted run, which left messages."""
        if self.interrupted and self.axis.size > 1:
            raise RunError(
                "The previous run of the schedule was interrupted, and its messages could be "
                "received as messages of this run. Restart the processes, build the engine again, "
                "and load the last checkpoint."
            )
        self.interrupted = True
        yield
        self.interrupted = False

    def _end(self, microbatches: Sequence[Microbatch]) -> None:
        if self.staging is not None:
            self.data.end_run()
            self.staging.share_buffers(each.trace for each in microbatches)

    @torch.no_grad()
    def evaluate(self, call: Callable[[nn.Module], Tensor]) -> Tensor | None:
        """Run one microbatch forward in eval mode; the result is on the last stage's rank."""
        staging, result = self.staging, Result()
        with eval_mode(self.model, *(staging.stages.layers.elsewhere if staging else ())):
            traced = self._trace_call(staging, call) if staging else _Traced(NOTHING_CROSSES, {})
            part = Microbatch(0, None, trace=traced.trace, lengths=traced.lengths)
            of = self.stages, self.units, result, lambda m, *_: call(m), [part]
            with self._whole_run():
                work = StageWork(*of, trains=False)
                run(forward_only(self.schedule, self.stages.count), self.axis, work)
            self._end([part])
        if staging is None:
            self.data.end_evaluation()
        return result.value

    def _trace(self, staging: Staging, part: Any) -> "_Traced":

        def make() -> _Traced:
            """Trace it on a copy."""
            copies, losses = list[Any](), list[Tensor]()

            def call(model: nn.Module) -> None:  # again for each read of an activation
                copies.append(copied(part))
                losses.append(self.objective(model, part, copies[-1]))

            with self._unseen():
                traced = self._trace_call(staging, call)
            trains = reaches(losses[-1], stages.layers.numbers)
            return traced._replace(trains=trains, written=is_written(copies[0]))

        def fits(known: _Traced) -> bool:
            of = (part, copied(part)) if known.written else (part,)
            with self._unseen():
                return stages.fits(known.trace, lambda model: self.objective(model, *of))

        stages = staging.stages
        return self.known.get(part, stages.layers.modes, make, fits)

    def _unseen(self) -> AbstractContextManager[None]:
        elsewhere = self.staging.stages.layers.elsewhere if self.staging else ()
        return as_before(self.data.consensus.same.doubts.functions.values(), self.model, *elsewhere)

    def _probe(self, staging: Staging, call: Callable[[nn.Module], Any]) -> ActivationProbe | None:
        """Answers reads of activations, where that needs no other ranks than the pipeline's."""
        alone = all(axis.size == 1 for axis in self.data.consensus.axes)
        gathers = any(unit.reshards for unit in self.data.units.order)
        if not alone and (gathers or not self.units.apart):
            return None  # data ranks may trace other shapes, at other times
        return ActivationProbe(staging, call, self.units)

    def _trace_call(self, staging: Staging, call: Callable[[nn.Module], Any]) -> "_Traced":
        stream = staging.beside.stream
        stream.begin()
        trace = staging.stages.trace(call, self._probe(staging, call))
        for stage, own in staging.stages.layers.own.items():
            self.data.read_outside(p for n, p in own.items() if n in trace.read[stage])
        return _Traced(trace, stream.lengths.known)


def reaches(loss: Tensor, numbers: Container[int]) -> bool:
    """Whether the graph of the loss ends in a tensor whose id is in `numbers`."""
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in numbers:
            return True
        seen.add(node)
        nodes += [each for each, _ in node.next_functions]
    return False


@dataclass(frozen=True, eq=False)
class EngineUnits:
    """The units of a model, or of this rank's stages: hooks gather and free them in each action.

    versions   the backward pass of a microbatch uses the weights of its forward pass
    last       without a pipeline, the microbatch whose backward pass reduces gradients
    """

    data: Data
    applied: Sequence[Applied]
    staging: Staging | None
    weights: LossWeights | None = None
    versions: Stale | None = None
    last: int | None = None
    postponed: dict[tuple[int, int], Products] = field(default_factory=dict)  # by I, for W

    @property
    def apart(self) -> bool:
        """Whether this rank computes no rows of others: without tokens its gradients are zero."""
        return not any(each.mixes for each in self.applied)

    @property
    def stream(self) -> Stream:
        return next(each.stream for each in self.applied if isinstance(each, Tensors))

    @contextmanager
    def around(self, op: str, stage: int, microbatch: Microbatch) -> Iterator[None]:
        """Around a forward of a pipeline, also sets the random seed of this step, microbatch and
        stage.
        """
        data, staged, device = self.data, self.data.staged, self.data.consensus.device
        data.consensus.phase("forward" if op == "F" else "backward")
        data.mute = self.apart and microbatch.tokens == 0
        if staged is None:
            if op == "F":
                data.begin_forward()
            data.sync = microbatch.index == self.last
            with during(self.applied, device):
                yield
            data.end_pass()
            return
        data.enter(stage, op, graded=graded(stage, microbatch.trace))
        with ExitStack() as entered:
            if self.versions is not None:
                entered.enter_context(self.versions.during(stage, microbatch.index))
            if op == "F":
                self.stream.begin(microbatch.lengths)
                entered.enter_context(seeded(device, microbatch.seed + stage))
            entered.enter_context(during(self.applied, device))
            if op == "W":
                data.multiply(self.postponed.pop((stage, microbatch.index)))
            staged.postponed = [] if op == "I" else None
            yield
        if op == "I":
            self.postponed[stage, microbatch.index] = staged.postponed or []
            staged.postponed = None
        data.leave()

    def reduce(self, stage: int) -> None:
        if self.staging is None:
            return  # hooks began each reduction when the last backward completed its unit
        self.data.consensus.phase("backward")
        self.data.reduce_stage(stage)

    def update(self, stage: int, microbatches: Sequence[Microbatch]) -> None:
        assert self.versions is not None and self.weights is not None
        _, parts = self.weights.totals[:, microbatches[-1].update]
        self.versions.update_stage(stage, parts / self.weights.scale)


def graded(stage: int, trace: StageTrace) -> bool:
    return stage > 0 and any(spec.requires_grad for spec in trace.bundles[stage - 1])


def _seed(axes: Sequence[Axis]) -> int:
    place = 0
    for axis in axes:
        place = place * axis.size + axis.rank
    return int(torch.randint(2**61, (), dtype=torch.int64, device="cpu")) + 2_147_483_647 * place
