"""The objects of a run that its steps and its end use."""

from dataclasses import dataclass, field

from rich.console import Console

from shardwise.comm.start.stop_signal import StopSignal
from shardwise.comm.world import World
from shardwise.core.errors import one_line
from shardwise.engine.engine import Engine
from shardwise.train.measure.metrics import MetricsWriter
from shardwise.train.measure.offload_trace import OffloadTracing
from shardwise.train.measure.progress import Progress
from shardwise.train.measure.tracing import Tracing
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
    tracing: Tracing
    updates: OffloadTracing
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
