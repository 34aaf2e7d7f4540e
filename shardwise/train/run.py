"""The objects of a run that its steps and its end use; and the agreement of ranks after a step.

A signal may reach ranks in different steps, or only one rank. All ranks must stop after the same
step, or some would wait forever in the next step's collectives. So after each step they all-reduce
their flags: one byte per rank, counted in the ledger under the phase `check`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from rich.console import Console

from shardwise.comm.move import all_reduce
from shardwise.comm.start.worker import StopSignal
from shardwise.comm.world import World
from shardwise.core.errors import one_line
from shardwise.engine.engine import Engine
from shardwise.train.measure.metrics import MetricsWriter
from shardwise.train.measure.progress import Progress
from shardwise.train.model import Batch
from shardwise.train.prepare import PreparedRun
from shardwise.train.saving import RunSaves


@dataclass
class LastStep:
    """This rank's share of the last step of this program, and the skipped steps before it."""

    share: Batch | None = None
    skipped_before: int = 0
    skipped: bool = False

    def add(self, share: Batch, skipped: bool) -> None:
        """Record a step."""
        self.skipped_before += self.skipped
        self.share, self.skipped = share, skipped


@dataclass(frozen=True)
class Run:
    """The objects that a step uses and reports to."""

    prepared: PreparedRun
    engine: Engine
    peak_flops: float | None
    unigram: float
    progress: Progress
    metrics: MetricsWriter
    stop: StopSignal
    profiled: Callable[[], object]
    saves: RunSaves
    last: LastStep = field(default_factory=LastStep)

    def note(self, text: str) -> None:
        """Show a line, unless it is empty."""
        if text:
            self.progress.note(text)


def say(text: str, world: World, console: Console | None) -> None:
    """Print on rank 0 why the run does not train."""
    if world.rank == 0:
        screen = console or Console(highlight=False, markup=False)
        screen.print(one_line(text), soft_wrap=True, markup=False)


def is_due(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every` (0: never)."""
    return every > 0 and step % every == 0


def any_rank(flag: bool, world: World) -> bool:
    """Whether the flag is set on at least one rank; the same result on all ranks."""
    return any(_numbers(flag, world))


@dataclass(frozen=True)
class Flags:
    """What ranks tell each other after a step, in one message.

    stop     a signal was received
    failed   a record could not be written, or a callback failed
    saved    no checkpoint is being written
    lost     a checkpoint could not be written
    """

    stop: bool
    failed: bool
    saved: bool
    lost: bool

    def agree(self, world: World) -> "Flags":
        """`saved` if it is set on all ranks, the others if on at least one; the same on all."""
        own = (self.stop, self.failed, self.saved, self.lost)
        numbers = _numbers(sum(flag << k for k, flag in enumerate(own)), world)
        bits = [[bool(number >> k & 1) for number in numbers] for k in range(len(own))]
        return Flags(any(bits[0]), any(bits[1]), all(bits[2]), any(bits[3]))


def _numbers(own: int, world: World) -> list[int]:
    """The number of each rank, a byte; the same list on all ranks."""
    numbers = torch.zeros(world.size, dtype=torch.uint8, device=world.device)
    numbers[world.rank] = own
    with world.ledger.phase("check"):
        all_reduce(numbers, world.everyone)
    return numbers.tolist()
