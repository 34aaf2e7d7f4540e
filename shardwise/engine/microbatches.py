"""A step without a pipeline: the schedule of one stage, whose microbatches accumulate.

    F0.0  B0.0  F0.1  B0.1  ...  REDUCE:0      hooks gather, free and reduce units meanwhile

It is run by the same loop as any other schedule (parallel/pipeline/runtime.py).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwise.comm.world import Axis
from shardwise.core.model_spec import Crossed
from shardwise.core.schedule.action import Action, Token
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.schedule import Schedule
from shardwise.core.stage_io import Spec
from shardwise.engine.tensor_layout import Tensors
from shardwise.parallel.data.hooks import Data
from shardwise.parallel.pipeline.runtime import run

Objective = Callable[[nn.Module, Any], Tensor]


@lru_cache(maxsize=16)
def one_stage(microbatches: int) -> Schedule:
    """Forward and backward of one microbatch after the other, on one rank."""
    row = [Action(op, 0, i) for i in range(microbatches) for op in ("F", "B")]
    return lower(Schedule((tuple(row),), (0,), microbatches))


class Pass(Protocol):
    """What takes a step's microbatches forward and backward.

    `parts` are the microbatches, `counts` their tokens. The sum of the loss over tokens is
    multiplied by `sum_scale`, a power of two, before it is differentiated.  Returns the sum of loss
    times tokens, a double, as far as it is known here.
    """

    microbatches: int
    sent: list[Crossed]

    def run(self, parts: Sequence[Any], counts: Sequence[int], sum_scale: float) -> Tensor: ...

    def evaluate(self, call: Callable[[nn.Module], Tensor]) -> Tensor | None:
        """What `call` makes of the model, without gradients; None where it is not known here."""
        ...


class _Tape(NamedTuple):
    """What a forward leaves for its backward: the loss, and the random numbers of the two."""

    loss: Tensor
    entered: ExitStack


class OneStage:
    """The whole model as the only stage (Work of parallel/pipeline/runtime.py)."""

    def __init__(
        self, model: nn.Module, data: Data, tensors: Tensors, objective: Objective, device: Any
    ) -> None:
        self.model, self.data, self.tensors = model, data, tensors
        self.objective, self.device = objective, device
        self.microbatches = 1
        self.sent: list[Crossed] = []  # nothing goes from stage to stage
        self.parts: Sequence[Any] = ()
        self.counts: Sequence[int] = ()
        self.sum_scale = 1.0
        self.summed: Tensor | None = None  # loss times tokens, of this step so far

    def run(self, parts: Sequence[Any], counts: Sequence[int], sum_scale: float) -> Tensor:
        """All microbatches; gradients are summed over the ranks with the last."""
        assert len(parts) == len(counts)
        self.parts, self.counts, self.sum_scale = parts, counts, sum_scale
        self.summed = summed = torch.zeros((), dtype=torch.float64, device=self.device)
        try:
            run(one_stage(len(parts)), Axis("none"), self)
        finally:
            self.parts, self.summed = (), None
        return summed

    def evaluate(self, call: Callable[[nn.Module], Tensor]) -> Tensor | None:
        self.tensors.stream.begin()
        return call(self.model)

    # --- what the schedule asks ---------------------------------------------------------------

    def specs(self, token: Token) -> Sequence[Spec]:
        """Nothing crosses."""
        return ()

    def forward(
        self, stage: int, microbatch: int, given: list[Tensor]
    ) -> tuple[list[Tensor], _Tape]:
        """F: the loss, times the tokens that it is a mean over."""
        count = self.counts[microbatch]
        self.data.sums.sync, self.data.mute = microbatch == len(self.counts) - 1, count == 0
        with ExitStack() as entered:
            entered.enter_context(self.tensors.random.during(self.device))
            loss = self.objective(self.model, self.parts[microbatch])
            if count and self.summed is not None:  # the mean over no tokens may be NaN
                self.summed += loss.detach().double() * count
            return [], _Tape(loss * (count * self.sum_scale), entered.pop_all())

    def backward(
        self, stage: int, microbatch: int, tape: _Tape, grads: list[Tensor]
    ) -> list[Tensor]:
        """B."""
        with tape.entered:
            self.data.facts.phase("backward")
            tape.loss.backward()
        return []

    def inputs(
        self, stage: int, microbatch: int, tape: _Tape, grads: list[Tensor]
    ) -> tuple[list[Tensor], Any]:
        """The schedule has no I."""
        raise AssertionError(Action("I", stage, microbatch))

    def weights(self, stage: int, microbatch: int, rest: Any) -> None:
        """The schedule has no W."""
        raise AssertionError(Action("W", stage, microbatch))

    def reduce(self, stage: int) -> None:
        """Hooks have begun the reductions as the last backward completed each unit."""

    def update(self, stage: int, microbatch: int) -> None:
        """The engine updates."""
        raise AssertionError(Action("U", stage, microbatch))
