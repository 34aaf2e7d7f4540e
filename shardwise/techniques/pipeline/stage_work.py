"""Executes the actions of a schedule (F, B, I, W, REDUCE, U) on the stages of a model.

    F        the stage's part of the user's own forward (staged_model.py)
    B        the gradients of the stage's inputs and of its weights, by one pass of autograd
    I        the same; large linear layers postpone their weights' gradients (weight_gradient.py)
    W        the postponed products (passes.py)
    REDUCE   the gradients of the stage's units (techniques/data/units.py)

The previous stage waits for I alone.  The first stage has no input to differentiate: its I does
nothing, and its W is all of B.  I frees the stage's graph; the factors of postponed products, an
output's gradient and an input of each layer, live until W.

Executions differ in three parts:

                            stages             behind the last stage          units
    engine                  WholeModel         ScaledLoss                     EngineUnits
    engine, pipeline        Stages             ScaledLoss                     EngineUnits
      their evaluations                        Result                         EngineUnits
    sw.Pipe                 Stages             PipeOutputs: gradients come    NoUnits
                                               from the user's loop
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise.core.schedule.schedule import Action, Token
from shardwise.engine.batch import copied
from shardwise.engine.optimizer.norm import LossWeights
from shardwise.techniques.pipeline.stage import Ran
from shardwise.techniques.pipeline.stage_io import Spec, StageTrace
from shardwise.techniques.pipeline.staged_model import Stages

#: The rest of a backward pass, which W runs.
Rest = Callable[[], object]


class StageTape:
    """The autograd graph of a stage's forward pass, for one B or one I: input leaves, and outputs
    that require gradients, of any shapes. It keeps the outputs' graph edges, not the tensors.
    """

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        assert all(x.is_leaf for x in inputs)
        self.input_leaves = list(inputs)
        self.outputs: list[GradientEdge] = [get_gradient_edge(y) for y in outputs]

    def backward(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """B: the gradients of `inputs`, or None, from the outputs'; accumulates parameters'."""
        inputs, self.input_leaves = self.input_leaves, []
        outputs, self.outputs = self.outputs, []
        if outputs:
            torch.autograd.backward(outputs, list(grads))
        found = [x.grad for x in inputs]
        for x in inputs:
            x.grad = None
        return found

    def inputs(self, grads: Sequence[Tensor]) -> tuple[list[Tensor | None], Rest]:
        """I: the gradients of `inputs`, and what W has to run: all of B, if I did nothing."""
        if any(x.requires_grad for x in self.input_leaves):
            return self.backward(grads), partial(self.backward, ())
        return [None] * len(self.input_leaves), partial(self.backward, grads)


#: The user's forward of one microbatch, with the loss if there is one, of a copy if it has one.
Call = Callable[..., Any]

#: The trace of a model in one stage.
NOTHING_CROSSES = StageTrace((), (), (), {}, (), frozenset(), ())


@dataclass(frozen=True)
class Microbatch:
    """A microbatch of one run of a schedule.

    index     its place in the run
    part      its part of the batch
    tokens    the number of tokens over which the loss is a mean
    update    which update of the step uses its gradients; 0 in synchronous schedules
    trace     what crosses between stages
    lengths   the lengths of sequences that are sharded on the tensor axis
    seed      the random seed of stage 0; stage s adds s
    written   whether the forward writes to the batch: each stage that runs it does so to a copy
    """

    index: int
    part: Any
    tokens: float = 0
    update: int = 0
    trace: StageTrace = NOTHING_CROSSES
    lengths: Mapping[int, int] = field(default_factory=dict[int, int])
    seed: int = 0
    written: bool = False


class WholeModel:
    """A model in one stage."""

    count = 1

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.storage = model, device

    def run(
        self,
        stage: int,
        trace: StageTrace,
        inputs: Sequence[Tensor],
        call: Callable[[nn.Module], Any],
    ) -> Ran:
        """The forward of the model."""
        assert not (stage or trace.bundles or inputs)
        return Ran(result=call(self.model))


class LastStage(Protocol):
    """Takes the result of the last stage, and supplies the gradients of it."""

    def outputs(self, microbatch: Microbatch, result: Any) -> list[Tensor]:
        """Take the result; returns the tensors from which the backward pass begins."""
        ...

    def gradients(self, microbatch: Microbatch) -> Sequence[Tensor]: ...


class StageUnits(Protocol):
    """What surrounds an action: the stage's units, and other state that its layers read."""

    def around(
        self, op: str, stage: int, microbatch: Microbatch
    ) -> AbstractContextManager[None]: ...

    def reduce(self, stage: int) -> None: ...

    def update(self, stage: int, microbatches: Sequence[Microbatch]) -> None:
        """U: update the stage from the microbatches up to the last of these."""
        ...


class StageWork:
    """The actions of this rank's stages in one run of a schedule; without `trains` there are no
    backward passes. Each tape and rest is passed back once.
    """

    def __init__(
        self,
        stages: Stages | WholeModel,
        units: StageUnits,
        last: LastStage,
        call: Call,
        microbatches: Sequence[Microbatch],
        *,
        trains: bool = True,
    ) -> None:
        self.stages, self.units, self.last, self.call = stages, units, last, call
        self.microbatches, self.trains = microbatches, trains
        self.device = stages.storage

    def specs(self, token: Token) -> Sequence[Spec]:
        """The specs of the tensors in the bundle `token`, an act or a grad."""
        trace = self.microbatches[token.microbatch].trace
        if token.kind == "act":
            return trace.bundles[token.stage]
        return [spec for spec in trace.bundles[token.stage - 1] if spec.requires_grad]

    def forward(
        self, stage: int, microbatch: int, inputs: list[Tensor]
    ) -> tuple[list[Tensor], StageTape | None]:
        """F: takes the previous stage's bundle; returns this stage's bundle and a tape."""
        own = self.microbatches[microbatch]
        if self.trains:
            for x, spec in zip(inputs, _received(own.trace, stage), strict=True):
                x.requires_grad_(spec.requires_grad)
        of = (own.part, copied(own.part)) if own.written else (own.part,)
        with self.units.around("F", stage, own):
            ran = self.stages.run(stage, own.trace, inputs, lambda m: self.call(m, *of))
        roots = [x for x in ran.outputs if x.requires_grad]
        if self._is_last(stage):
            roots = self.last.outputs(own, ran.result)
        return ran.outputs, StageTape(inputs, roots) if self.trains else None

    def backward(
        self, stage: int, microbatch: int, tape: StageTape, grads: list[Tensor]
    ) -> list[Tensor]:
        """B: from the gradients of the stage's outputs to those of its inputs."""
        own = self.microbatches[microbatch]
        with self.units.around("B", stage, own):
            found = tape.backward(self._arrived(stage, own, grads))
        return self._grads_back(stage, own, found)

    def inputs(
        self, stage: int, microbatch: int, tape: StageTape, grads: list[Tensor]
    ) -> tuple[list[Tensor], Rest]:
        """I: as B without the weights' gradients, which W computes from the rest returned."""
        own = self.microbatches[microbatch]
        with self.units.around("I", stage, own):
            found, rest = tape.inputs(self._arrived(stage, own, grads))
        return self._grads_back(stage, own, found), rest

    def weights(self, stage: int, microbatch: int, rest: Rest) -> None:
        with self.units.around("W", stage, self.microbatches[microbatch]):
            rest()

    def reduce(self, stage: int) -> None:
        self.units.reduce(stage)

    def update(self, stage: int, microbatch: int) -> None:
        self.units.update(stage, self.microbatches[: microbatch + 1])

    def _is_last(self, stage: int) -> bool:
        return stage == self.stages.count - 1

    def _arrived(
        self, stage: int, microbatch: Microbatch, grads: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        return self.last.gradients(microbatch) if self._is_last(stage) else grads

    def _grads_back(
        self, stage: int, microbatch: Microbatch, found: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The bundle `grad` of a stage; zeros for an input without a gradient."""
        return [
            torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)
            if x is None
            else x.contiguous()
            for x, spec in zip(found, _received(microbatch.trace, stage), strict=True)
            if spec.requires_grad
        ]


def _received(trace: StageTrace, stage: int) -> Sequence[Spec]:
    return trace.bundles[stage - 1] if stage else ()


class ScaledLoss:
    """The last stage returns the loss, a mean over tokens; the backward pass begins with `weights`.
    `summed`, fp64: the losses times tokens of all microbatches; zero without the last stage.
    """

    def __init__(self, weights: LossWeights, device: torch.device) -> None:
        self.weights = weights
        self.summed = torch.zeros((), dtype=torch.float64, device=device)
        self.losses: dict[int, Tensor] = {}  # of the microbatches whose backward is to come

    def outputs(self, microbatch: Microbatch, result: Tensor) -> list[Tensor]:
        if microbatch.tokens:  # the mean over no tokens may be NaN
            self.summed += result.detach().double() * microbatch.tokens
        self.losses[microbatch.index] = result.detach()
        return [result]

    def gradients(self, microbatch: Microbatch) -> list[Tensor]:
        loss = self.losses.pop(microbatch.index)
        weight = self.weights.of(microbatch.tokens, microbatch.update)
        return [weight.to(loss).expand_as(loss)]


class Result:
    """The result of an evaluation, on the rank with the last stage."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def outputs(self, microbatch: Microbatch, result: Any) -> list[Tensor]:
        self.value = result
        return []

    def gradients(self, microbatch: Microbatch) -> list[Tensor]:
        raise AssertionError(microbatch)


class NoUnits:
    """Replicated parameters, updated by the user's loop."""

    def around(self, op: str, stage: int, microbatch: Microbatch) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce(self, stage: int) -> None: ...

    def update(self, stage: int, microbatches: Sequence[Microbatch]) -> None:
        raise AssertionError(Action("U", stage, len(microbatches) - 1))
