"""A run: the objects that its steps use, the agreement of ranks after a step, and its end.

A signal may reach ranks in different steps, or only one rank. All ranks must stop after the same
step, or some would wait forever in the next step's collectives. So after each step they all-reduce
their flags: one byte per rank, counted in the ledger under the phase `check`. A signal after the
last save ends the run too: on all ranks before the report, and after that on rank 0 at once.
"""

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from rich.console import Console

from shardwise.comm.move import all_gather_object, all_reduce
from shardwise.comm.start.worker import StopSignal
from shardwise.comm.world import World
from shardwise.core.errors import InputError, one_line
from shardwise.core.mesh import EXPERTS
from shardwise.core.tally import by_kind
from shardwise.engine.engine import Engine
from shardwise.engine.step_end import Progress
from shardwise.models.decoder import parameters
from shardwise.train import metrics
from shardwise.train.metrics import MetricsWriter
from shardwise.train.model import Batch, dry_twin, prediction_of
from shardwise.train.prepare import PreparedRun
from shardwise.train.progress import Shown
from shardwise.train.report_contents import contents_of, table
from shardwise.train.report_files import write
from shardwise.train.run_folder import PAGE, REPORT, best_name
from shardwise.train.saving import Position, RunSaves
from shardwise.train.summary import RankCost, Summary, TimeCost, disk_line, time_cost

NO_REPORT = "stopped by a signal after the last step, which is saved; --resume makes the report"
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # the unit of getrusage's ru_maxrss

T = TypeVar("T")


@dataclass
class LastStep:
    """This rank's share of the last step of this program, and where the engine was before it."""

    share: Batch | None = None
    before: Progress | None = None
    skipped: bool = False


@dataclass(frozen=True)
class Run:
    """The objects that a step uses and reports to."""

    prepared: PreparedRun
    engine: Engine
    peak_flops: float | None
    unigram: float
    progress: Shown
    metrics: MetricsWriter
    stop: StopSignal
    profiled: Callable[[], object]
    saves: RunSaves
    last: LastStep = field(default_factory=LastStep)

    def note(self, text: str) -> None:
        if text:
            self.progress.note(text)


def say(text: str, world: World, console: Console | None) -> None:
    """Print on rank 0 why the run does not train."""
    if world.rank == 0:
        screen = console or Console(highlight=False, markup=False)
        screen.print(one_line(text), soft_wrap=True, markup=False)


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def any_rank(flag: bool, world: World) -> bool:
    """The same result on all ranks."""
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
        """`saved` if it is set on all ranks, the others if on at least one; alike on all ranks."""
        own = (self.stop, self.failed, self.saved, self.lost)
        numbers = _numbers(sum(flag << k for k, flag in enumerate(own)), world)
        bits = [[bool(number >> k & 1) for number in numbers] for k in range(len(own))]
        return Flags(any(bits[0]), any(bits[1]), all(bits[2]), any(bits[3]))


def _numbers(own: int, world: World) -> list[int]:
    numbers = torch.zeros(world.size, dtype=torch.uint8, device=world.device)
    numbers[world.rank] = own
    with world.ledger.phase("check"):
        all_reduce(numbers, world.everyone)
    return numbers.tolist()


# --- the end -----------------------------------------------------------------------------------


class StoppedError(Exception):
    """A rank has received a signal; raised on all ranks."""


def finish(run: Run, began: Position, console: Console | None) -> Summary | None:
    """Collect the costs (all ranks), then write the report (rank 0)."""
    try:
        made = collect(run, began, console)
        return None if made is None else publish_report(made, console)
    except (StoppedError, KeyboardInterrupt):
        say(NO_REPORT, run.engine.world, console)
    except Exception as error:  # noqa: BLE001  the run is finished and saved
        print(
            f"shardwise: rank {run.engine.world.rank} made no report ({why(error)}); the run is "
            "finished and saved, and --resume makes the report",
            file=sys.stderr,
        )
    finally:
        run.stop.leaving = False
    return None


def collect(run: Run, began: Position, console: Console | None) -> Summary | None:
    """The summary on rank 0, None on the other ranks. Called by all ranks."""
    prepared, engine = run.prepared, run.engine
    config = prepared.config
    costs = all_gather_object(own_cost(run), engine.world)
    if disk := disk_line(engine):
        say(disk, engine.world, console)
    if any_rank(run.stop.received, engine.world):
        raise StoppedError
    if engine.world.rank != 0:
        return None
    run.stop.leaving = True  # no other rank waits for this one
    if run.stop.received:
        raise StoppedError
    summary = Summary(
        config=config,
        plan=str(prepared.plan),
        ranks=engine.world.size,
        parameters=parameters(prepared.sizes),
        packed=prepared.corpus.packed,
        records=metrics.read(config.folder),
        unigram=run.unigram,
        began=began.step,
        costs=costs,
        saves=run.saves.costs,
        best=attempt("the best checkpoint", lambda: best_name(config)) or "",
    )
    return replace(summary, time=attempt("the time of a step", lambda: own_time(run, summary)))


def own_time(run: Run, summary: Summary) -> TimeCost | None:
    """The time of a step of this rank; None without a cluster, or a step of this program."""
    cluster, share = run.prepared.config.run.cluster, run.last.share
    if cluster is None or share is None:
        return None
    predicted = prediction_of(run.prepared, run.engine, share).step_time(cluster)
    return time_cost(cluster, predicted, summary.recent)


def publish_report(summary: Summary, console: Console | None) -> Summary:
    """Write and show the report, with a line for each picture that fails."""
    screen = console or Console(highlight=False, markup=False)
    contents, path = contents_of(summary), summary.config.folder
    screen.print(table(contents))
    for failure in write(contents, path):
        screen.print(failure, soft_wrap=True, markup=False)
    page = f"; open {path / PAGE} in a browser" if (path / PAGE).is_file() else ""
    screen.print(one_line(f"report: {path / REPORT}{page}"), soft_wrap=True, markup=False)
    return summary


def attempt(what: str, make: Callable[[], T]) -> T | None:
    """None if `make` fails; an error that is not an InputError is printed."""
    try:
        return make()
    except InputError:
        return None
    except Exception as error:  # noqa: BLE001  the run is finished and saved
        print(f"shardwise: {what} is missing from the report ({why(error)})", file=sys.stderr)
        return None


def why(error: BaseException) -> str:
    """The kind of an error, and the first line of its text."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def own_cost(run: Run) -> RankCost:
    """This rank's memory and the traffic of its last step, measured and, if possible, predicted."""
    engine, last = run.engine, run.last
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES
    measured = RankCost(engine.memory(), {}, engine.measured_bytes(), {}, peak_bytes=peak_bytes)
    if last.share is None or last.skipped:
        return measured
    share = last.share
    found = attempt("the prediction", lambda: dry_cost(run, share))
    return replace(found, peak_bytes=peak_bytes) if found else measured


def dry_cost(run: Run, share: Batch) -> RankCost:
    """This rank's cost beside that of a dry run; its first step learns the order of units."""
    engine, dry = run.engine, dry_twin(run.prepared, run.engine)
    dry.step(None, share)
    sent = by_kind(dry.step(run.last.before, share))
    routed = tuple(kind for kind in sent if kind == f"{EXPERTS} all_to_all")
    known = {kind: n for kind, n in sent.items() if kind not in routed}
    memory = dry.memory()
    found = {name: memory.get(name, 0) for name in engine.memory()}
    return RankCost(engine.memory(), found, engine.measured_bytes(), known, routed)
