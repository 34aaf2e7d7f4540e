"""A step of an engine under the schedule of a pipeline (stage_work.py executes its actions).

Every rank of the pipeline axis has the full microbatch; ranks send each other only the values that
later stages use. Every rank computes their shapes on meta, once for each shape of microbatch, so no
shapes are sent.

Each step, microbatch, stage and share of the data has its own random seed, so stages draw different
dropout masks, which do not depend on the rank that has the stage.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm.unchanged import eval_mode, seeded
from shardwise.comm.world import Axis
from shardwise.core.applied import Applied, during
from shardwise.core.errors import RunError
from shardwise.engine.batch import Count, copied, enough, is_written
from shardwise.engine.checks.guard import Guard
from shardwise.engine.optimizer.norm import LossWeights
from shardwise.engine.optimizer.optimizer import ShardedOptimizer
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.data.units import Products
from shardwise.techniques.pipeline.runtime import Watch, forward_only, open_channels, run
from shardwise.techniques.pipeline.stage_io import StageTrace
from shardwise.techniques.pipeline.stage_module import Staging
from shardwise.techniques.pipeline.stage_work import Call, Microbatch, Result, ScaledLoss, StageWork
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


class Pipelined:
    """The stages of one rank at work."""

    def __init__(self, model: nn.Module, units: "ScheduledUnits", objective: Call) -> None:
        self.stale: Stale | None = None
        staging, data = units.staging, units.data
        self.model, self.units, self.staging, self.data = model, units, staging, data
        self.objective, self.device = objective, staging.stages.device
        self.microbatches = staging.schedule.microbatches
        self.watch: Watch | None = None
        self.known = ByShape[_Traced]()
        self.share = _place(data.consensus.axes)
        self.interrupted = False  # whether a run has begun and not ended
        self.trains = False  # whether a loss of the step is computed from parameters that train
        open_channels(staging.schedule, staging.axis, self.device)

    def require(self, batch: Any, microbatches: int, count: Count | None) -> None:
        enough(batch, microbatches, count)

    def updates_stages(self, optimizer: ShardedOptimizer, guard: Guard) -> bool:
        """Whether the schedule updates each stage; else the engine does after it."""
        if self.staging.schedule.update:
            self.stale = Stale(self.staging, self.data, optimizer, guard)
        return self.stale is not None

    def shared(self, names: Sequence[str], used: Tensor) -> Tensor:
        return self.staging.shared(names, used)

    def leave_out(self) -> bool:
        """A step ends without its update; whether some stages have updated before."""
        self.interrupted |= self.stale is not None
        return self.stale is not None

    def run(self, parts: Sequence[Any], counts: Sequence[float], weights: LossWeights) -> Tensor:
        """Run all microbatches; only the rank with the last stage has the sum of the loss."""
        loss = ScaledLoss(weights, self.device)
        seed = (
            int(torch.randint(2**61, (), dtype=torch.int64, device="cpu"))
            + 2_147_483_647 * self.share
        )
        self.trains = False
        for first in range(0, len(parts), self.microbatches):
            these = range(first, first + self.microbatches)
            microbatches = [
                self._microbatch(k, parts[k], counts[k], seed + 1_000_003 * k) for k in these
            ]
            units = replace(self.units, weights=weights, versions=self.stale, postponed={})
            work = StageWork(self.staging.stages, units, loss, self.objective, microbatches)
            self.data.sync = these.stop == len(parts)
            self.data.order.begin_run()
            with self._whole_run(), self.stale.running() if self.stale else nullcontext():
                run(self.staging.schedule, self.staging.axis, work, self.watch)
            self.data.end_run()
            self.staging.share_buffers(each.trace for each in microbatches)
        if self.stale is None:
            self.data.reduce_last()
        for flat in () if self.trains else self.data.consensus.trained:
            flat.grads.has_grad = [False] * len(flat.params)  # earlier stages received zeros
        return loss.summed

    def _microbatch(self, index: int, part: Any, tokens: float, seed: int) -> Microbatch:
        size = self.staging.schedule.update
        place, update = index % self.microbatches, index // size if size else 0
        traced = self._trace(part)
        self.trains |= traced.trains
        of = traced.trace, traced.lengths, seed, traced.written
        return Microbatch(place, part, tokens, update, *of)

    @contextmanager
    def _whole_run(self) -> Iterator[None]:
        """Around a run; raises after an interrupted one, whose messages may still arrive."""
        if self.interrupted and self.staging.axis.size > 1:
            raise RunError(
                "The previous run of the schedule was interrupted, and its messages could be "
                "received as messages of this run. Restart the processes, build the engine again, "
                "and load the last checkpoint."
            )
        self.interrupted = True
        yield
        self.interrupted = False

    @torch.no_grad()
    def evaluate(self, call: Callable[[nn.Module], Tensor]) -> Tensor | None:
        """Run one microbatch forward in eval mode; the result is on the last stage's rank."""
        staging, result = self.staging, Result()
        with eval_mode(self.model, *staging.stages.layers.elsewhere):
            part = Microbatch(0, None, 0, 0, *self._trace_call(call))
            of = staging.stages, self.units, result, lambda m, *_: call(m), [part]
            with self._whole_run():
                work = StageWork(*of, trains=False)
                run(forward_only(staging.schedule, staging.stages.count), staging.axis, work)
            self.data.end_run()
            staging.share_buffers([part.trace])
        return result.value

    def _trace(self, part: Any) -> "_Traced":
        """What crosses for a microbatch of these shapes; traced once for each shape."""

        def make() -> _Traced:
            """Trace it on a copy."""
            copies, losses = list[Any](), list[Tensor]()

            def call(model: nn.Module) -> None:  # again for each read of an activation
                copies.append(copied(part))
                losses.append(self.objective(model, part, copies[-1]))

            traced = self._trace_call(call)
            trains = reaches(losses[-1], stages.layers.numbers)
            return traced._replace(trains=trains, written=is_written(copies[0]))

        def fits(known: _Traced) -> bool:
            of = (part, copied(part)) if known.written else (part,)
            return stages.fits(known.trace, lambda model: self.objective(model, *of))

        stages = self.staging.stages
        return self.known.get(part, stages.layers.modes, make, fits)

    def _probe(self, call: Callable[[nn.Module], Any]) -> ActivationProbe | None:
        """Answers reads of activations, where that needs no other ranks than the pipeline's."""
        alone = all(axis.size == 1 for axis in self.data.consensus.axes)
        gathers = any(unit.reshards for unit in self.data.units.order)
        if not alone and (gathers or not self.units.apart):
            return None  # data ranks may trace other shapes, at other times
        return ActivationProbe(self.staging, call, self.units)

    def _trace_call(self, call: Callable[[nn.Module], Any]) -> "_Traced":
        stream = self.staging.beside.stream
        stream.begin()
        trace = self.staging.stages.trace(call, self._probe(call))
        for stage, own in self.staging.stages.layers.own.items():
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
class ScheduledUnits:
    """The units of this rank's stages, gathered and freed by hooks during each action. With
    `versions`, the backward pass of a microbatch uses the weights of its forward pass.
    """

    data: Data
    applied: Sequence[Applied]
    staging: Staging
    apart: bool
    weights: LossWeights | None = None
    versions: Stale | None = None
    postponed: dict[tuple[int, int], Products] = field(default_factory=dict)  # by I, for W

    @property
    def stream(self) -> Stream:
        return next(each.stream for each in self.applied if isinstance(each, Tensors))

    @contextmanager
    def around(self, op: str, stage: int, microbatch: Microbatch) -> Iterator[None]:
        """Around a forward, also sets the random seed of this step, microbatch and stage."""
        data, staged, device = self.data, self.data.staged, self.staging.stages.device
        assert staged is not None
        data.consensus.phase("forward" if op == "F" else "backward")
        data.mute = self.apart and microbatch.tokens == 0
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
        self.data.consensus.phase("backward")
        self.data.reduce_stage(stage)

    def update(self, stage: int, microbatches: Sequence[Microbatch]) -> None:
        assert self.versions is not None and self.weights is not None
        _, parts = self.weights.totals[:, microbatches[-1].update]
        self.versions.update_stage(stage, parts / self.weights.scale)


def graded(stage: int, trace: StageTrace) -> bool:
    return stage > 0 and any(spec.requires_grad for spec in trace.bundles[stage - 1])


def _place(axes: Sequence[Axis]) -> int:
    place = 0
    for axis in axes:
        place = place * axis.size + axis.rank
    return place
