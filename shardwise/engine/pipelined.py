"""A step under a schedule: what its actions do with an engine's model and parameters.

    F        the stage's part of the user's own forward (staged_model.py), with the loss in the last
    B I W    autograd, from the gradients that came to those that go (parallel/pipeline/backward.py)
    REDUCE   the gradients of the stage's units (parallel/data/staged_hooks.py)

Every rank of the pipeline axis has the whole microbatch; what crosses between ranks are the values
that later stages use.  Their shapes are learnt once for each shape of microbatch, on meta, by every
rank alike, so that none is ever sent.

Random numbers are drawn from a generator of each step, microbatch, stage and share of the data, set
aside around the forward: dropout does not repeat itself from stage to stage, and does not depend on
which rank has the stage.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm.world import Axis
from shardwise.core.errors import RunError
from shardwise.core.model_spec import Crossed
from shardwise.core.schedule.action import Action, Step, Token, Transfer
from shardwise.core.schedule.schedule import Schedule
from shardwise.core.stage_io import Spec, Trace
from shardwise.engine.microbatches import Objective
from shardwise.engine.rng import seeded
from shardwise.engine.stage_module import Staging
from shardwise.engine.tensor_layout import Tensors
from shardwise.engine.weight_stashing import Stale
from shardwise.parallel.data.hooks import Data
from shardwise.parallel.data.staged_hooks import PutOff
from shardwise.parallel.data.units import Unit
from shardwise.parallel.pipeline.backward import Rest, Tape
from shardwise.parallel.pipeline.bundles import ByShape, grads_back, require_grads, specs
from shardwise.parallel.pipeline.runtime import Watch, open_channels, run
from shardwise.prediction.unit_gathers import Gather, UnitPath, reads, unit_gathers, whole_bytes


@dataclass
class _Taped:
    """What a forward left: its tape, the wanted gradients' specs, the last stage's own outputs."""

    tape: Tape
    loss: Tensor | None


class _Known(NamedTuple):
    """What is known of a forward, and of the sequences that are split in it."""

    trace: Trace
    lengths: Mapping[int, int]


class Pipelined:
    """The stages of one rank at work."""

    def __init__(
        self,
        model: nn.Module,
        staging: Staging,
        data: Data,
        tensors: Tensors,
        objective: Objective,
    ) -> None:
        assert data.staged is not None
        self.model, self.staging, self.data, self.tensors = model, staging, data, tensors
        self.units = data.staged
        self.objective, self.device = objective, staging.stages.device
        self.microbatches = staging.schedule.microbatches
        self.watch: Watch | None = None
        self.known = ByShape[_Known]()
        self.share = _place(data.facts.axes)
        self.first = 0  # of the step's microbatches, in this run of the schedule
        self.parts: Sequence[Any] = ()
        self.traces: list[_Known] = []
        self.call: Callable[[nn.Module, Any], Tensor] = objective
        self.training = True
        self.sent: list[Crossed] = []  # in the last step
        self.torn = False  # whether a run has begun and not ended
        self.sum_scale = 1.0  # what the sum of the loss over tokens is multiplied by
        self.summed: Tensor | None = None  # loss times tokens, of this step so far
        self.result: Tensor | None = None  # of the last stage, where nothing is trained
        self.stale: Stale | None = None  # where the schedule updates by itself
        open_channels(staging.schedule, staging.axis, self.device)

    def run(self, parts: Sequence[Any], counts: Sequence[int], sum_scale: float) -> Tensor:
        """All microbatches, so many at a time as the schedule has; gradients are summed once."""
        self.summed = torch.zeros((), dtype=torch.float64, device=self.device)
        self.seed = int(torch.randint(2**61, ())) + 2_147_483_647 * self.share
        self.call, self.training, self.sum_scale = self.objective, True, sum_scale
        self.sent = []
        for first in range(0, len(parts), self.microbatches):
            these = slice(first, first + self.microbatches)
            self.parts, self.counts = parts[these], counts[these]
            self.first = first
            self.traces = [self._trace(part) for part in self.parts]
            self.data.sums.sync = these.stop == len(parts)
            self.data.begin_run()
            with self._whole_run(), self.stale.running() if self.stale else nullcontext():
                run(self.staging.schedule, self.staging.axis, self, self.watch)
            self.data.end_run()
            self._note_sent(self.staging.schedule)
        if self.stale is None:
            self.units.end()
        return self._forget(self.summed)

    @contextmanager
    def _whole_run(self) -> Iterator[None]:
        """Around a run: after one that broke off, messages of it are under way to other ranks."""
        if self.torn and self.staging.axis.size > 1:
            raise RunError(
                "A run of the schedule after one that broke off: what other ranks had sent for "
                "that one would be taken for this one's. End the processes, make the engine "
                "again, and load the last checkpoint."
            )
        self.torn = True
        yield
        self.torn = False

    def _forget(self, found: Any) -> Any:
        """Let go of the batch and of what came of it, which is the caller's."""
        self.parts, self.call, self.summed, self.result = (), self.objective, None, None
        return found

    @torch.no_grad()
    def evaluate(self, call: Callable[[nn.Module], Tensor]) -> Tensor | None:
        """Forward only, one microbatch through all stages; the result where the last stage is."""
        self.parts, self.training, self.result = [None], False, None
        self.call = lambda model, _: call(model)
        self.traces = [self._follow(call)]
        self.seed = 0
        with self._whole_run():
            run(forward_only(self.staging.schedule), self.staging.axis, self)
        self.data.end_run()
        return self._forget(self.result)

    def _trace(self, part: Any) -> "_Known":
        """What crosses for a microbatch of these shapes; learnt when they are first seen."""

        def make() -> _Known:
            return self._follow(lambda model: self.objective(model, part))

        return self.known.get(part, self.model.training, make)

    def _follow(self, call: Callable[[nn.Module], Any]) -> "_Known":
        stream = self.staging.beside.stream
        stream.begin()
        trace = self.staging.stages.follow(call)
        for stage, own in self.staging.stages.layers.own.items():
            self.data.read_outside(p for n, p in own.items() if n in trace.read[stage])
        return _Known(trace, stream.lengths.known)

    # --- what a schedule asks (parallel/pipeline/runtime.py) --------------------------------------

    def specs(self, token: Token) -> Sequence[Spec]:
        """What crosses: values of a stage forward, the gradients of those that have one back."""
        return specs(self.traces[token.microbatch].trace, token)

    def forward(self, stage: int, microbatch: int, given: list[Tensor]) -> tuple[list[Tensor], Any]:
        """F, from the values that came; the tape is None where nothing is trained."""
        self.data.facts.phase("forward")
        self.data.enter(stage, "F")
        trace, lengths = self.traces[microbatch]
        if self.training:
            require_grads(given, trace, stage)
        part = self.parts[microbatch]
        stream = self.tensors.stream
        stream.begin(lengths)
        drawing = self._drawing(stage, microbatch)
        with self._version(stage, microbatch), drawing, self.tensors.random.during(self.device):
            ran = self.staging.stages.run(stage, trace, given, lambda model: self.call(model, part))
        stream.end()
        self.data.leave()
        last = stage == self.staging.stages.count - 1
        if not self.training:
            self.result = ran.result if last else None
            return ran.outputs, None
        if not last:
            pairs = zip(ran.outputs, trace.bundles[stage], strict=True)
            return ran.outputs, _Taped(
                Tape(given, [y for y, spec in pairs if spec.requires_grad]), None
            )
        if self.counts[microbatch] and self.summed is not None:  # the mean of none may be NaN
            self.summed += ran.result.detach().double() * self.counts[microbatch]
        scaled = ran.result * (self.counts[microbatch] * self.sum_scale)
        return [], _Taped(Tape(given, [scaled]), torch.ones_like(scaled))

    def backward(self, stage: int, microbatch: int, tape: Any, grads: list[Tensor]) -> list[Tensor]:
        """B."""
        with self._going_back("B", stage, microbatch):
            return self._grads_back(stage, microbatch, tape.tape.backward(_own(tape, grads)))

    def inputs(
        self, stage: int, microbatch: int, tape: Any, grads: list[Tensor]
    ) -> tuple[list[Tensor], Any]:
        """I."""
        with self._going_back("I", stage, microbatch):
            found, rest = tape.tape.inputs(_own(tape, grads), freed=self.data.frees)
        return self._grads_back(stage, microbatch, found), (rest, self.units.later())

    def weights(self, stage: int, microbatch: int, rest: tuple[Rest, PutOff]) -> None:
        """W."""
        own, products = rest
        with self._going_back("W", stage, microbatch):
            self.data.multiply(products)
            own.weights()

    def reduce(self, stage: int) -> None:
        """REDUCE."""
        self.data.facts.phase("backward")
        self.units.reduce(stage)

    def update(self, stage: int, microbatch: int) -> None:
        """U, which schedules that update by themselves have."""
        assert self.stale is not None
        first = microbatch + 1 - self.staging.schedule.update
        self.stale.update(stage, sum(self.counts[first : microbatch + 1]), self.sum_scale)

    @contextmanager
    def _going_back(self, op: str, stage: int, microbatch: int) -> Iterator[None]:
        self.data.facts.phase("backward")
        self.data.mute = self.counts[microbatch] == 0
        self.data.enter(stage, op, reads=reads(op, self._graded(stage, self.traces[microbatch])))
        with self._version(stage, microbatch), self.tensors.random.during(self.device):
            yield
        self.data.leave()

    def _graded(self, stage: int, known: _Known) -> bool:
        """Whether what the stage is given requires a gradient."""
        return stage > 0 and any(spec.requires_grad for spec in known.trace.bundles[stage - 1])

    def _version(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """The parameters as the microbatch uses them."""
        if self.stale is None or not self.training:
            return nullcontext()
        return self.stale.during(stage, microbatch)

    def _grads_back(
        self, stage: int, microbatch: int, found: Sequence[Tensor | None]
    ) -> list[Tensor]:
        return grads_back(found, self.traces[microbatch].trace, stage, self.device)

    def _drawing(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Random numbers of this step, microbatch and stage; the generators go on as they were."""
        return seeded(self.device, self.seed + 1_000_003 * (self.first + microbatch) + stage)

    # --- what was sent ------------------------------------------------------------------------

    def _note_sent(self, schedule: Schedule) -> None:
        for step in schedule.rows[self.staging.axis.rank]:
            if isinstance(step, Transfer) and step.op == "SEND":
                phase = "forward" if step.token.kind == "act" else "backward"
                self.sent += [
                    Crossed(phase, math.prod(spec.shape), spec.dtype.itemsize)
                    for spec in self.specs(step.token)
                ]

    def gathers(self, unit: Unit) -> tuple[int, int]:
        """How often a run of the schedule gathers a unit, forward and backward."""
        row = self.staging.schedule.actions(self.staging.axis.rank)
        found = unit_gathers(row, {stage: self._path(stage) for stage in self.units.units})
        return found[Gather(unit, "forward")], found[Gather(unit, "backward")]

    def whole_bytes(self) -> int:
        """The most bytes that gathered units take at once in a run, by the formula."""
        stored: dict[Hashable, int] = {
            unit: sum(g.plan.padded * g.dtype.itemsize for g in unit.groups if g.temporary)
            for unit in self.data.units.order
        }
        ahead = self.data.pace.ahead
        return max(whole_bytes(self._path(stage), stored, ahead) for stage in self.units.units)

    def _path(self, stage: int) -> UnitPath:
        """The units of a stage as its last forward used them; before one, as they are defined."""
        known = self.known.latest
        own, way = self.units.units[stage], self.data.ways[stage]
        path = way.path or [unit for unit in own if not unit.keep]
        back = [unit for unit in dict.fromkeys(path) if unit.reached][::-1]
        return UnitPath(
            around=tuple(unit for unit in own if unit.keep),
            forward=tuple(path),
            backward=tuple(unit if unit.wanted_backward else None for unit in back),
            graded=stage > 0 if known is None else self._graded(stage, known),
        )


def _place(axes: Sequence[Axis]) -> int:
    """A number for each place on the axes."""
    place = 0
    for axis in axes:
        place = place * axis.size + axis.rank
    return place


def _own(taped: _Taped, grads: list[Tensor]) -> list[Tensor]:
    return grads if taped.loss is None else [taped.loss]


def forward_only(schedule: Schedule) -> Schedule:
    """One microbatch forward through the stages of `schedule`, and nothing else."""
    home = schedule.home
    rows: list[list[Step]] = [[] for _ in schedule.rows]
    for stage, rank in enumerate(home):
        row, act = rows[rank], Token("act", stage - 1, 0)
        if stage and home[stage - 1] != rank:
            rows[home[stage - 1]].append(Transfer("SEND", act, rank))
            row.append(Transfer("RECV", act, home[stage - 1]))
        row.append(Action("F", stage, 0))
    done = tuple(tuple(row) for row in rows)
    return replace(schedule, rows=done, microbatches=1, update=0, lag=())
