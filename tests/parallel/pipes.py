"""A pipeline of plain layers: its model, its data, and the work of a rank's stages.

Between two stages go a vector for each row, and a mask of whole numbers, which has no gradient.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.ledger import Tally
from shardwise.comm.world import World
from shardwise.core.mesh import Mesh
from shardwise.core.schedule.action import Step, Token
from shardwise.core.schedule.library import build
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.schedule import Schedule
from shardwise.techniques.pipeline.backward import StageTape
from shardwise.techniques.pipeline.runtime import open_channels, run
from shardwise.techniques.pipeline.stage_io import Spec
from tests.engine.cases import settled

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Size:
    """How wide the vectors are, and how many of them a microbatch has."""

    width: int = 6
    rows: int = 3

    @property
    def act_bytes(self) -> int:
        """A vector in fp64 and a mask in int64 for each row."""
        return 8 * self.rows * (self.width + 1)

    @property
    def grad_bytes(self) -> int:
        return 8 * self.rows * self.width


def model(stages: int, size: Size) -> nn.ModuleList:
    """The stages, each of two layers; settled by names, so that every rank has the same."""
    width = size.width
    whole = nn.ModuleList(
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).double()
        for _ in range(stages)
    )
    settled(whole)
    return whole


def batch(microbatch: int, size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """A microbatch's vectors, mask and targets."""
    own = torch.Generator().manual_seed(500 + microbatch)
    x, y = torch.randn(2, size.rows, size.width, generator=own, dtype=torch.float64)
    return x, torch.randint(0, 3, (size.rows, 1), generator=own), y


def through(module: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    return x + module(x) * mask / 2


def loss_of(y: Tensor, target: Tensor, microbatches: int) -> Tensor:
    return (y - target).square().mean() / microbatches


@dataclass
class Outcome:
    """What a step came to: the losses by microbatch, and gradients by name."""

    losses: dict[int, float]
    grads: dict[str, Tensor]


def in_one_process(stages: int, microbatches: int, size: Size) -> Outcome:
    whole, losses = model(stages, size), {}
    for i in range(microbatches):
        x, mask, target = batch(i, size)
        for module in whole:
            x = through(module, x, mask)
        loss = loss_of(x, target, microbatches)
        loss.backward()
        losses[i] = loss.item()
    return Outcome(losses, grads_of(whole, range(stages)))


def grads_of(whole: nn.ModuleList, stages: Any) -> dict[str, Tensor]:
    named = [(f"{s}.{n}", p.grad) for s in stages for n, p in whole[s].named_parameters()]
    return {n: grad for n, grad in named if grad is not None}


class Layers:
    """The work of a rank (runtime.py: Work), which notes what it makes and is asked."""

    device = CPU

    def __init__(self, schedule: Schedule, rank: int, size: Size) -> None:
        self.schedule, self.size = schedule, size
        self.whole = model(len(schedule.home), size)
        self.losses: dict[int, float] = {}
        self.tapes: weakref.WeakSet[Any] = weakref.WeakSet()
        self.made: list[weakref.ref[Tensor]] = []
        self.asked: list[str] = []

    def specs(self, token: Token) -> list[Spec]:
        rows, width = self.size.rows, self.size.width
        vector = Spec((rows, width), torch.float64, requires_grad=True)
        mask = Spec((rows, 1), torch.int64, requires_grad=False)
        return [vector, mask] if token.kind == "act" else [vector]

    def forward(
        self, stage: int, microbatch: int, inputs: list[Tensor]
    ) -> tuple[list[Tensor], Any]:
        x, mask, target = batch(microbatch, self.size)
        leaves = []
        if stage:
            x, mask = inputs
            leaves = [x.requires_grad_()]
        y = through(self.whole[stage], x, mask)
        self._note(*leaves, y, *inputs)
        if stage == self.schedule.last_stage:
            y = loss_of(y, target, self.schedule.microbatches)
            self.losses[microbatch] = y.item()
        tape = StageTape(leaves, [y])
        self.tapes.add(tape)
        return [y, mask], tape

    def backward(
        self, stage: int, microbatch: int, tape: StageTape, grads: list[Tensor]
    ) -> list[Tensor]:
        self._note(*grads)
        return self._whole(tape.backward(grads or [torch.ones((), dtype=torch.float64)]))

    def inputs(
        self, stage: int, microbatch: int, tape: StageTape, grads: list[Tensor]
    ) -> tuple[list[Tensor], Any]:
        self._note(*grads)
        found, rest = tape.inputs(grads or [torch.ones((), dtype=torch.float64)])
        self.tapes.add(rest)
        return self._whole(found), rest

    def weights(self, stage: int, microbatch: int, rest: Any) -> None:
        rest.weights()

    def reduce(self, stage: int) -> None:
        self.asked.append(f"REDUCE:{stage}")

    def update(self, stage: int, microbatch: int) -> None:
        self.asked.append(f"U{stage}.{microbatch}")

    def alive(self) -> int:
        """How many of the tensors that passed through are alive."""
        return sum(ref() is not None for ref in self.made)

    def _note(self, *tensors: Tensor) -> None:
        self.made.extend(map(weakref.ref, tensors))

    def _whole(self, grads: list[Tensor | None]) -> list[Tensor]:
        self._note(*(grad for grad in grads if grad is not None))
        assert all(grad is not None for grad in grads)
        return [grad for grad in grads if grad is not None]


class Peak:
    """A watch that looks at how many tapes and rests there are after each step."""

    def __init__(self, work: Layers) -> None:
        self.work, self.tapes = work, 0

    def now(self) -> float:
        return 0.0

    def __call__(self, step: Step, start_s: float, end_s: float) -> None:
        self.tapes = max(self.tapes, len(self.work.tapes))


@dataclass
class Ran:
    """What one rank has to tell of a run."""

    outcome: Outcome
    sent: Tally
    peak: int
    left: int
    asked: list[str]


def piped(world: World, schedule: Schedule | str, size: Size | None = None) -> Ran:
    """One step of a schedule, or of that of a word, on all ranks of the world."""
    size = size or Size()
    if isinstance(schedule, str):
        schedule = lower(build(schedule, world.size))
    here = world.on(Mesh((("pp", world.size),)))
    axis = here.axis("pp")
    work = Layers(schedule, axis.rank, size)
    open_channels(schedule, axis, CPU)
    peak = Peak(work)
    run(schedule, axis, work, peak)
    outcome = Outcome(work.losses, grads_of(work.whole, schedule.stages(axis.rank)))
    sent = sum((t for key, t in here.ledger.lines.items() if key.phase != "open"), start=Tally())
    return Ran(outcome, sent, peak.tapes, len(work.tapes) + work.alive(), work.asked)
