"""A run: the objects that its steps use, the agreement of ranks after a step, and its end.

A signal may reach ranks in different steps, or only one rank. All ranks must stop after the same
step, or some would wait forever in the next step's collectives. So after each step they all-reduce
their flags, a byte each, counted in the ledger under the phase `check`. A signal after the
last save ends the run too: on all ranks before the report, and after that on rank 0 at once.
"""

import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.checkpoint.engines import fill, planned_save
from shardwise.checkpoint.folder import find, prune, step_of
from shardwise.checkpoint.open_checkpoint import IMPORTED, OpenCheckpoint
from shardwise.checkpoint.pending import FAILED_S, PendingCheckpoint
from shardwise.checkpoint.save import PlannedSave
from shardwise.comm.move import all_gather_object, all_reduce, on_rank_zero
from shardwise.comm.start.worker import StopSignal
from shardwise.comm.world import World
from shardwise.core.errors import InputError, RunError, bad, one_line
from shardwise.core.mesh import EXPERTS
from shardwise.core.tally import by_kind
from shardwise.core.tools.arguments import is_count
from shardwise.engine.engine import Engine
from shardwise.engine.step_end import Metrics as StepMetrics
from shardwise.engine.step_end import Progress
from shardwise.models.pretrained import PREFIX
from shardwise.train import metrics
from shardwise.train.data.data import Index, block
from shardwise.train.metrics import MetricsWriter
from shardwise.train.model import Batch, batch, dry_twin, prediction_of
from shardwise.train.prepare import PreparedRun
from shardwise.train.progress import Shown
from shardwise.train.run_folder import PAGE, REPORT, best_name, checkpoints_of
from shardwise.train.run_report import report_of, write
from shardwise.train.summary import RankCost, SaveCosts, Summary, TimeCost, disk_line, time_cost

NO_REPORT = "stopped by a signal after the last step, which is saved; --resume makes the report"
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # the unit of getrusage's ru_maxrss

T = TypeVar("T")


@dataclass(frozen=True)
class Position:
    """Steps done, and sequences consumed by them."""

    step: int = 0
    consumed: int = 0


class RunSaves:
    """The checkpoints that a run saves: at most one is being written."""

    def __init__(
        self, prepared: PreparedRun, engine: Engine, saved: Callable[[int, Path], object]
    ) -> None:
        """`saved` is called on all ranks with the step and the path of what was published."""
        self.prepared, self.engine, self.saved = prepared, engine, saved
        self.pending: PendingCheckpoint | None = None
        self.costs = SaveCosts()

    @property
    def written(self) -> bool:
        return self.pending is None or self.pending.done()

    @property
    def lost(self) -> bool:
        return self.pending is not None and self.pending.failed

    def save(self, at: Position, validation: float | None, *, wait: bool) -> str:
        """Save a checkpoint, and remove old ones. Called by all ranks.
        Without `wait`, a thread may write it, and the return value says what failed. With `wait`,
        raises RunError, since no step follows that could save again.
        """
        said, began_s = self.settle(), time.perf_counter()
        train, folder = self.prepared.config.train, checkpoints_of(self.prepared.config)
        scalars = {
            "step": at.step,
            "consumed": at.consumed,
            "data": self.prepared.data_mark,
            "plan": str(self.prepared.plan),  # for information; another plan can load it
            "engine": self.engine.scalars(),
        } | ({} if validation is None else {"validation": validation})
        keep = partial(prune, folder, train.keep, best=train.keep_best)
        frozen = self.prepared.config.model.lora_rank is None  # else the folder has the weights
        planned = planned_save(self.engine, folder, scalars, keep, frozen=frozen)
        if train.async_save and not wait:
            self.pending = PendingCheckpoint(planned)
        else:
            said += self._finished(planned, wait=wait)
        held_s = time.perf_counter() - began_s
        self.costs = replace(self.costs, held_s=self.costs.held_s + held_s)
        return said

    def _finished(self, planned: PlannedSave, *, wait: bool) -> str:
        try:
            path = planned.finish()
        except RunError as error:
            if wait:
                raise
            return _goes_on(error)
        self._published(planned.step, path)
        return ""

    def settle(self) -> str:
        """Wait for the pending checkpoint; returns what failed. Called by all ranks."""
        pending, self.pending = self.pending, None
        if pending is None:
            return ""
        try:
            path = pending.result()
        except RunError as error:
            return _goes_on(error)
        self.costs = replace(self.costs, write_s=self.costs.write_s + pending.write_s)
        self._published(step_of(path), path)
        return ""

    def close(self, *, failed: bool = False) -> None:
        """Wait for what this rank writes, but not for long if the run has failed."""
        if self.pending is not None:
            self.pending.wait(FAILED_S if failed else None)

    def _published(self, step: int, path: Path) -> None:
        self.costs = replace(self.costs, saves=self.costs.saves + 1)
        self.saved(step, path)


def _goes_on(error: RunError) -> str:
    return f"{str(error).removesuffix('.')}. Training goes on without this checkpoint"


def share(prepared: PreparedRun, engine: Engine, numbers: Index) -> Batch:
    """The rows of this rank among the sequences of a global batch."""
    mine = block(numbers, engine.data_rank, engine.data_ranks)
    rows = prepared.corpus.rows(mine, documents=prepared.config.data.documents)
    # of a pipeline each microbatch has a row; else the engine knows which ones have none
    least = engine.microbatches if engine.staging and len(mine) else 0
    by_ids = prepared.config.model.name.startswith(PREFIX)
    return batch(rows, least, engine.world.device, by_ids=by_ids)


class Prefetch:
    """This rank's shares of the batches: a thread reads each during the step before it."""

    def __init__(self, prepared: PreparedRun, engine: Engine) -> None:
        self._prepared, self._engine = prepared, engine
        self._reader = ThreadPoolExecutor(1, "batches")
        self._next: Future[tuple[int, Batch]] | None = None

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def take(self, consumed: int) -> tuple[int, Batch]:
        """Return the number of sequences in the next global batch, and this rank's share of it.
        `consumed` is the number of sequences before it; batches are taken in order.
        """
        coming = self._next or self._reader.submit(self._read, consumed)
        count, mine = coming.result()
        self._next = self._reader.submit(self._read, consumed + count)
        return count, mine

    def _read(self, consumed: int) -> tuple[int, Batch]:
        numbers = self._prepared.batches.numbers(consumed)
        return len(numbers), share(self._prepared, self._engine, numbers)


@dataclass
class LastStep:
    """This rank's share of the last step of this program, and where the engine was before it."""

    share: Batch | None = None
    before: Progress | None = None
    metrics: StepMetrics | None = None

    @property
    def skipped(self) -> bool:
        return self.metrics is not None and self.metrics.skipped  # waits for the device


@dataclass(frozen=True)
class Run:
    """The objects that a step uses and reports to."""

    prepared: PreparedRun
    engine: Engine
    batches: Prefetch
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


def on_any_rank(world: World, *flags: bool) -> list[bool]:
    """Which of the flags is set on at least one rank; the same result on all ranks."""
    numbers = torch.tensor(flags, dtype=torch.uint8, device=world.device)
    with world.ledger.phase("check"):
        return all_reduce(numbers, world.everyone, "max").bool().tolist()


def load_run(prepared: PreparedRun, engine: Engine) -> Position:
    """Load the latest checkpoint into the engine, unless its data or model differs."""

    def check(opened: OpenCheckpoint) -> None:
        """Raise InputError unless a run on the same data saved it, or it has weights alone."""
        if IMPORTED in opened.scalars:
            return
        consumed, data = opened.scalars.get("consumed"), opened.scalars.get("data")
        if not is_count(consumed) or not isinstance(data, dict):
            raise bad(
                f"a checkpoint in '{folder}' without a position in the data",
                "a checkpoint saved by shardwise train, which has one",
                "--overwrite for a new run",
            )
        _check_data(data, prepared.data_mark)

    folder = on_rank_zero(lambda: find(checkpoints_of(prepared.config)), engine.world)
    scalars = fill(engine, folder, check)
    return Position(scalars["step"], 0 if IMPORTED in scalars else scalars["consumed"])


def _check_data(saved: dict[str, object], here: dict[str, object]) -> None:
    names = {"tokens": "the data or its tokens", "sequence": "model.sequence"}
    names |= {"validation": "data.validation", "weights": "data.weights", "seed": "train.seed"}
    other = [name for name in names if saved.get(name) != here[name]]
    if other:
        raise bad(
            "a checkpoint to resume from that was trained with "
            + ", ".join(f"{names[n]} = {saved.get(n)} (now {here[n]})" for n in other),
            "the same data, sequence length, validation share and seed",
            "the configuration in the run's folder, or --overwrite for a new run",
        )


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
    if any(on_any_rank(engine.world, run.stop.received)):
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
        parameters=prepared.sizes.parameters,
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
    report, path, grid = report_of(summary), summary.config.folder, Table.grid(padding=(0, 3))
    for name, value in report.rows:
        grid.add_row(Text(name, style="dim"), Text(value))
    screen.print(grid)
    for failure in write(report, path):
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
