"""The training loop, from checked inputs to the report.

After the last save nothing fails the run: an error in a picture or the report is printed in a line.
After a signal there is no report, since a batch system may give only seconds.

All decisions (the batch, the learning rate, when to evaluate and save) are functions of the step.
So all ranks decide the same, and a resumed run continues as the first run would have.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
import torch
from rich.console import Console
from torch import profiler

from shardwise.callbacks.callback import Callbacks
from shardwise.checkpoint.engines import fill_weights
from shardwise.checkpoint.folder import all_in, find, passed_over
from shardwise.comm.move import on_all_ranks, on_rank_zero
from shardwise.comm.start.worker import NOTHING, REQUEUE, StopSignal
from shardwise.comm.world import World
from shardwise.core.errors import NonFiniteError
from shardwise.engine.checks.consistency import require_same
from shardwise.engine.checks.device_room import explained, ran_out
from shardwise.engine.engine import Engine
from shardwise.engine.step_end import Metrics as StepMetrics
from shardwise.engine.step_end import Progress
from shardwise.train import metrics, progress, run_folder
from shardwise.train.config import Config
from shardwise.train.data.data import unigram_entropy
from shardwise.train.metrics import Record, step_loads
from shardwise.train.model import (
    Batch,
    build,
    learning_rate,
    with_least_offload,
)
from shardwise.train.prepare import PreparedRun, RunStart, hold_folder, prepare
from shardwise.train.run import (
    Position,
    Prefetch,
    Run,
    RunSaves,
    finish,
    is_due,
    load_run,
    on_any_rank,
    say,
    share,
)
from shardwise.train.summary import Summary

LOCK_PATIENCE_S = 5.0  # for the ranks of torchrun and Slurm: a restart may come before an end
SAME = ("model", "train", "plan")  # sections that all ranks have alike
MEMORY_EVERY = 20  # steps between two measurements of memory, which visit all tensors


def train(
    config: Config,
    world: World,
    start: RunStart | None = None,
    console: Console | None = None,
    stop: StopSignal | None = None,
    *,
    locked: bool = False,
) -> Summary | None:
    """Train by a configuration; returns the summary on rank 0, None on other ranks.
    Rank 0 holds the lock on the run's folder, unless it is `locked` for this run.
    `stop` receives signals from before the call; without it, the loop receives them. A signal
    before the first step ends the run, which can then be started again.
    Raises InputError for wrong inputs, before anything is written, and NonFiniteError for a
    non-finite loss or gradient; older checkpoints stay.
    """
    with ExitStack() as stack:
        stop = stop or stack.enter_context(StopSignal())
        start = own_folder(config, world, start or RunStart(), stack, locked=locked)
        prepared = with_least_offload(prepare(config, world.size, start), world)
        if start.resume and (done := run_folder.finished_message(config)):
            return say(done, world, console)
        stop.leaving = False  # from here on, all ranks stop together
        require_same_inputs(prepared, world)
        engine = build(prepared, world)
        at = load_run(prepared, engine) if start.resume else begun(prepared, engine)
        # every rank has checked the folder and built the engine, before rank 0 changes the folder
        if any(on_any_rank(world, stop.received)):
            return say(NOTHING, world, console)
        vocabulary = prepared.corpus.packed.vocabulary
        on_rank_zero(lambda: run_folder.claim(config, start.overwrite, vocabulary), world)
        with ExitStack() as shown:
            run = begin(prepared, engine, at, stop, console=console, stack=shown)
            opening(run, at)
            if any(on_any_rank(world, stop.received)):
                return say(NOTHING, world, console)
            stopped = steps(run, at)
            run.saves.close()
        return None if stopped else finish(run, at, console)


def begun(prepared: PreparedRun, engine: Engine) -> Position:
    """The first position of a new run, with the weights of `train.init_from`."""
    folder = on_rank_zero(lambda: run_folder.first_weights(prepared.config), engine.world)
    if folder is not None:
        fill_weights(engine, folder)
    return Position()


def require_same_inputs(prepared: PreparedRun, world: World) -> None:
    """Raise InputError on all ranks unless they have read the same configuration and data."""
    config = prepared.config
    own = {f"{part}.{k}": v for part in SAME for k, v in getattr(config, part).model_dump().items()}
    own |= {"the tokens of data.source": prepared.corpus.packed.key}
    require_same(world, own, "the same configuration and data, in a folder that all ranks see")


def begin(
    prepared: PreparedRun,
    engine: Engine,
    at: Position,
    stop: StopSignal,
    *,
    console: Console | None,
    stack: ExitStack,
) -> Run:
    """The objects of the run's steps. `stack` closes the display and the files of metrics."""
    config, world = prepared.config, engine.world
    first, done, of = world.rank == 0, at.step, config.train.steps
    callbacks = Callbacks(prepared.callbacks, world)
    opened: list[TextIO] = []
    writer = metrics.writer(config.folder, done)
    on_rank_zero(lambda: opened.append(stack.enter_context(writer)), world)
    run = callbacks.run(config.folder, config=config.model_dump(), step=done, engine=engine)
    on_all_ranks(lambda: stack.enter_context(run), world)
    profile = profiling(world, config.folder, of - done, on=config.run.profile)
    writing = metrics.MetricsWriter(opened[0] if first else None, callbacks)
    saves = RunSaves(prepared, engine, writing.saved)
    stack.push(lambda kind, *_: saves.close(failed=kind is not None))
    batches = Prefetch(prepared, engine)
    stack.callback(batches.close)
    return Run(
        prepared=prepared,
        engine=engine,
        batches=batches,
        peak_flops=metrics.peak_flops(config.run.cluster, prepared.plan, world.device),
        unigram=unigram_entropy(prepared.corpus) if first else math.nan,
        metrics=writing,
        progress=stack.enter_context(progress.display(of, first, console)),
        stop=stop,
        profiled=stack.enter_context(profile),
        saves=saves,
    )


def own_folder(
    config: Config, world: World, start: RunStart, stack: ExitStack, *, locked: bool
) -> RunStart:
    """Lock the run's folder until the stack ends; returns `start` with `auto` resolved."""

    def hold() -> RunStart:
        patience_s = LOCK_PATIENCE_S if world.size > 1 else 0.0
        held = nullcontext(start) if locked else hold_folder(config, start, patience_s)
        return stack.enter_context(held).resolve_auto(config)

    return on_rank_zero(hold, world)


def opening(run: Run, at: Position) -> None:
    """Print the plan, the data and the baseline."""
    packed, config = run.prepared.corpus.packed, run.prepared.config
    bits = run.unigram / math.log(2) / packed.bytes_per_token
    run.progress.note(
        f"{run.prepared.plan} on {progress.ranks_text(run.engine.world.size)}, "
        f"{len(packed.stream):,} tokens of {', '.join(config.data.source)}"
        + (f", resumed after step {at.step}" if at.step else "")
    )
    if at.step and (over := passed_over(config.folder / run_folder.CHECKPOINTS)):
        run.progress.note(over)
    run.progress.note(
        f"unigram baseline on validation: {run.unigram:.4f} nats a token, {bits:.3f} bits a byte"
    )


def steps(run: Run, at: Position) -> bool:
    """Train from `at` to the last step; True if a signal stopped it before."""
    config, hours = run.prepared.config.train, run.prepared.config.run.max_hours
    ends_s = math.inf if hours is None else time.monotonic() + 3600 * hours
    before, began_s = at, time.perf_counter()
    while at.step < config.steps:
        run.engine.set_lr(learning_rate(at.step, config))
        count, mine = run.batches.take(at.consumed)
        done = train_step(run, mine)
        run.profiled()
        at = Position(at.step + 1, at.consumed + count)
        last = at.step == config.steps
        due = is_due(at.step, config.save_every)
        evaluates = last or is_due(at.step, config.eval_every) or (due and config.keep_best)
        if not (evaluates or due or is_due(at.step, config.record_every)):
            continue
        entry = record(run, done, at, before, began_s)
        validation = evaluate(run) if evaluates else None
        tell(run, replace(entry, validation=validation))
        world, failure = run.engine.world, bool(run.metrics.failure)
        writing, lost, late = not run.saves.written, run.saves.lost, time.monotonic() > ends_s
        flags = run.stop.received, failure, writing, lost, late
        stop, failed, writing, lost, late = on_any_rank(world, *flags)
        if failed:
            on_all_ranks(run.metrics.require_written, world)
        if lost or not writing:
            run.note(run.saves.settle())
        if last or stop or late or due:
            run.note(run.saves.save(at, validation, wait=last or stop or late))
        run.note(run.metrics.take_unwritten())
        if (stop or late) and not last:
            run.stop.code = 0 if stop else REQUEUE
            why = "by a signal" if stop else f"at run.max_hours = {hours}"
            run.progress.note(
                f"stopped {why} after step {at.step}; the checkpoint is saved, and --resume "
                "continues from it. No report was made"
            )
            return True
        before, began_s = at, time.perf_counter()
    return False


def train_step(run: Run, mine: Batch) -> StepMetrics:
    """Run a step. Raises NonFiniteError, on every rank, and RunError if memory runs out."""
    try:
        before = Progress.of(run.engine)
        done = run.engine.step(mine)
        run.last.share, run.last.before, run.last.metrics = mine, before, done
        return done
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, NonFiniteError):
            raise _with_advice(run, error) from None
        if ran_out(error):
            at = run.engine.plan, run.engine.world.rank
            raise explained(error, f"in step {run.engine.steps + 1}", *at) from error
        raise


def _with_advice(run: Run, error: NonFiniteError) -> NonFiniteError:
    checkpoints = run.prepared.config.folder / run_folder.CHECKPOINTS
    kept = "No checkpoint had been saved yet. A smaller train.lr or a longer train.warmup may help"
    if all_in(checkpoints):
        slower = f"--resume --set train.lr={run.prepared.config.train.lr / 3:.1g}"
        kept = f"The last good checkpoint is {find(checkpoints)}: continue with {slower}"
    return NonFiniteError(
        f"{str(error).removesuffix('.')}. The run was stopped. {kept}, for example, or skip such "
        "steps: --set train.on_nonfinite=skip."
    )


def evaluate(run: Run) -> float:
    """The mean loss over a fixed, evenly spaced subset of the validation split."""
    config = run.prepared.config.train
    held = run.prepared.corpus.validation
    count = min(config.eval_sequences, len(held))
    chosen = held[np.arange(count) * len(held) // count]
    total, tokens = 0.0, 0
    for start in range(0, count, config.batch):
        part = share(run.prepared, run.engine, chosen[start : start + config.batch])
        loss, asked = run.engine.evaluate(part)
        total, tokens = total + loss * asked, tokens + asked
    return total / tokens


def record(run: Run, done: StepMetrics, at: Position, before: Position, began_s: float) -> Record:
    """The step as a record, with the mean time of the steps since `before`. MFU: this rank's share
    of the model's operations over its peak.
    """
    loss = done.loss  # waits for the device
    seconds = (time.perf_counter() - began_s) / (at.step - before.step)
    flops = done.tokens / run.engine.world.size * run.prepared.sizes.flops_per_token
    loads = step_loads(run.engine)
    look = at.step % MEMORY_EVERY == 0 or at.step in (1, 2, run.prepared.config.train.steps)
    return Record(
        step=at.step,
        consumed=at.consumed,
        loss=loss,
        lr=done.lr,
        tokens=int(done.tokens),
        seconds=seconds,
        tokens_per_s=done.tokens / seconds,
        mfu=None if run.peak_flops is None else flops / seconds / run.peak_flops,
        sent_bytes=done.bytes,
        grad_norm=done.grad_norm,
        skipped=done.skipped,
        memory_bytes=run.engine.memory() if look else None,
        expert_loads=loads.computed,
        dropped=loads.dropped,
        gate_entropy=loads.entropy,
        ranks=run.engine.world.size,
    )


def tell(run: Run, record: Record) -> None:
    run.progress.step(record)
    run.metrics.write(record)


WARM, STEPS = 3, 5  # steps before the first of the profile, if the run is long enough; of it
FOLDER: Final = "profile"
#: Allocations that a memory snapshot has at most.
_ALLOCATIONS: Final = 100_000


@contextmanager
def profiling(world: World, folder: Path, steps: int, *, on: bool) -> Iterator[Callable[[], Any]]:
    """A function to call after each of so many steps; without `on` it records nothing."""
    if not on:
        yield lambda: None
        return
    warm = max(0, min(WARM, steps - STEPS))
    path, cuda = folder / FOLDER / f"rank-{world.rank}.json", world.device.type == "cuda"
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(found: Any) -> None:
        found.export_chrome_trace(str(path))
        if cuda:
            torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
            torch.cuda.memory._record_memory_history(enabled=None)

    if cuda:
        torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
    waits, warmup = max(0, warm - 1), min(1, warm)
    when = profiler.schedule(wait=waits, warmup=warmup, active=min(STEPS, steps), repeat=1)
    with profiler.profile(schedule=when, on_trace_ready=write) as found:
        yield found.step
