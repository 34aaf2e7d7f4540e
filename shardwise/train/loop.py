"""The training loop, from checked inputs to the report.

    take this rank's share of the global batch
    step; the run stops if the loss or the gradient is not finite (engine/guard.py)
    evaluate, record, show
    agree on whether a rank has received a signal to stop
    save

All decisions (the batch, the learning rate, when to evaluate and save) are functions of the step.
So all ranks decide the same, and a resumed run continues as the first run would have.
"""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from torch import Tensor

from shardwise.checkpoint.folder import all_in, find, passed_over
from shardwise.comm.objects import all_gather_object
from shardwise.comm.world import World
from shardwise.core.errors import InputError, NonFiniteError
from shardwise.engine.engine import Engine
from shardwise.engine.out_of_memory import explained, ran_out
from shardwise.engine.training import Metrics as StepMetrics
from shardwise.models.decoder import flops_per_token, logits, parameters
from shardwise.prediction.traffic import by_kind
from shardwise.train import folder, metrics, progress, report
from shardwise.train.baseline import ddp_baseline
from shardwise.train.config import Config
from shardwise.train.data import Index, block, unigram_entropy
from shardwise.train.disk_share import StepsOnDisk, disk_line
from shardwise.train.experts import step_loads
from shardwise.train.learning import learning_rate
from shardwise.train.metrics import Metrics, Record
from shardwise.train.model import (
    Batch,
    batch,
    build,
    fit_clusters,
    has_clusters,
    optimizer_of,
    prediction_of,
    predictor,
    stacked_names,
    with_least_offload,
)
from shardwise.train.offload_trace import OffloadTracing
from shardwise.train.peak import Peak, measured_peak
from shardwise.train.prepare import PreparedRun, Start, prepare
from shardwise.train.process_memory import process_memory, resident_bytes
from shardwise.train.progress import Progress
from shardwise.train.report import Cost, Summary
from shardwise.train.sample import NextToken, sample, visible
from shardwise.train.saving import Position, load_run, save_run
from shardwise.train.stacked_loads import StackedLoads
from shardwise.train.step_memory import StepMemory
from shardwise.train.stop import any_rank
from shardwise.train.stop_signal import NOTHING, StopSignal
from shardwise.train.tracing import Tracing

MEMORY_EVERY = 20  # steps between two measurements of memory, which visit all tensors


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
    peak: Peak
    unigram: float
    progress: Progress
    metrics: Metrics | None
    stop: StopSignal
    tracing: Tracing
    updates: OffloadTracing
    memory: StepMemory
    before_bytes: int  # of this process, before the model was made
    disk: StepsOnDisk
    stacked: StackedLoads
    last: LastStep = field(default_factory=LastStep)


def train(
    config: Config,
    world: World,
    start: Start | None = None,
    console: Console | None = None,
    stop: StopSignal | None = None,
) -> Summary | None:
    """Train by a configuration; returns the summary on rank 0, None on other ranks.

    `stop` receives signals from before the call; without it, the loop receives them. A signal
    before the first step ends the run and leaves no file.

    Raises InputError for wrong inputs, before anything is written, and NonFiniteError for a
    non-finite loss or gradient; older checkpoints stay.
    """
    start = (start or Start()).resolve_auto(config)
    with ExitStack() as stack:
        first = world.rank == 0
        stop = stop or stack.enter_context(StopSignal())
        prepared = with_least_offload(prepare(config, world.size, start), world)
        if start.resume and (done := folder.finished_message(config)):
            return say(done, world, console)
        stop.leaving = False  # from here on, all ranks stop together
        before = resident_bytes()
        engine = build(prepared, world)
        at = load_run(prepared, engine) if start.resume else Position()
        # every rank has checked the folder and built the engine, before rank 0 changes the folder
        if any_rank(stop.received, world):
            return say(NOTHING, world, console)
        if first:
            folder.claim(config, start.overwrite)
            if not start.resume:
                stack.callback(folder.forget, config.folder)  # keeps a run with a recorded step
        peak = Peak(measured_peak(world.device, engine.dtype or torch.float32, world.barrier))
        unigram = unigram_entropy(prepared.corpus) if first else math.nan
        board = config.run.tensorboard
        kept = stack.enter_context(metrics.writer(config.folder, at.step, board)) if first else None
        shown = stack.enter_context(progress.display(config.train.steps, first, console))
        tracing = Tracing(engine, at.step, config.train.steps, on=config.run.trace)
        memory = StepMemory(engine, at.step, config.train.steps)
        updates = OffloadTracing(engine, tracing.steps, on=config.run.trace)
        stacked = StackedLoads(engine, stacked_names(prepared))
        recorders = tracing, updates, memory, before, StepsOnDisk(engine), stacked
        run = Run(prepared, engine, peak, unigram, shown, kept, stop, *recorders)
        opening(run, at)
        if at.step == 0 and has_clusters(prepared):
            with run.disk.outside_of_steps():
                fit_clusters(engine, share(run, prepared.batches.numbers(0)))
        early = any_rank(stop.received, world)
        stopped = early or steps(run, at)
        if not early and (said := updates.write(config.folder)):
            shown.note(said)
    if early:
        return say(NOTHING, world, console)
    return finish(run, at, stopped, console)


def say(text: str, world: World, console: Console | None) -> None:
    """Print on rank 0 why the run does not train."""
    if world.rank == 0:
        (console or Console(highlight=False)).print(text, soft_wrap=True, markup=False)


def opening(run: Run, at: Position) -> None:
    """Print the plan, the data and the baseline."""
    packed, config = run.prepared.corpus.packed, run.prepared.config
    bits = run.unigram / math.log(2) / packed.bytes_per_token
    run.progress.note(
        f"{run.prepared.plan} on {report.ranks_text(run.engine.world.size)}, "
        f"{len(packed.stream):,} tokens of {config.data.source}"
        + (f", resumed after step {at.step}" if at.step else "")
    )
    if run.engine.staging and config.plan.stages == "time":
        run.progress.note(f"stages begin at {', '.join(run.engine.staging.begins)}, by time")
    if at.step and (over := passed_over(config.folder / folder.CHECKPOINTS)):
        run.progress.note(over)
    run.progress.note(
        f"unigram baseline on validation: {run.unigram:.4f} nats a token, {bits:.3f} bits a byte"
    )


def steps(run: Run, at: Position) -> bool:
    """Train from `at` to the last step; True if a signal stopped it before."""
    config = run.prepared.config.train
    while at.step < config.steps:
        numbers = run.prepared.batches.numbers(at.consumed)
        began = time.perf_counter()
        run.engine.set_lr(learning_rate(at.step, config))
        mine = share(run, numbers)
        recording = run.tracing.recording(at.step), run.updates.recording(at.step)
        with recording[0], recording[1], run.memory.measuring(at.step, mine):
            done = train_step(run, mine)
            seconds = time.perf_counter() - began
        at = Position(at.step + 1, at.consumed + len(numbers))
        last = at.step == config.steps
        validation = None
        if last or is_due(at.step, config.eval_every):
            with run.disk.outside_of_steps():
                validation = evaluate(run)
        entry = record(run, done, at, seconds)
        if entry.memory_bytes is not None:
            entry = replace(entry, memory_bytes=entry.memory_bytes | run.memory.activations)
        tell(run, replace(entry, validation=validation))
        stop = any_rank(run.stop.received, run.engine.world)
        if last or stop or is_due(at.step, config.save_every):
            with run.disk.outside_of_steps():
                save_run(run.prepared, run.engine, at)
        if stop and not last:
            run.progress.note(f"stopped by a signal after step {at.step}; the checkpoint is saved")
            return True
    return False


def share(run: Run, numbers: Index) -> Batch:
    """This rank's part of a global batch, for the engine."""
    mine = block(numbers, run.engine.data_rank, run.engine.data_ranks)
    rows = run.prepared.corpus.rows(mine)
    return batch(rows, run.engine.microbatches, run.engine.world.device)


def is_due(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every` (0: never)."""
    return every > 0 and step % every == 0


def train_step(run: Run, mine: Batch) -> StepMetrics:
    """Run a step. Raises NonFiniteError, on every rank, and InputError if memory runs out."""
    try:
        done = run.engine.step(mine)
        run.last.add(mine, done.skipped)
        return done
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, NonFiniteError):
            raise _with_advice(run, error) from None
        if ran_out(error):
            raise explained(error, run.engine, predictor(run.prepared, mine)) from error
        raise


def _with_advice(run: Run, error: NonFiniteError) -> NonFiniteError:
    """The error with advice on how to continue."""
    checkpoints = run.prepared.config.folder / folder.CHECKPOINTS
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
        loss, asked = run.engine.evaluate(share(run, chosen[start : start + config.batch]))
        total, tokens = total + loss * asked, tokens + asked
    return total / tokens


def record(run: Run, done: StepMetrics, at: Position, seconds: float) -> Record:
    """The step as a record. MFU: this rank's share of the model's operations over its peak."""
    flops = done.tokens / run.engine.world.size * flops_per_token(run.prepared.sizes)
    mfu = run.peak.share(flops / seconds)
    loads = step_loads(run.engine, run.stacked)
    look = at.step % MEMORY_EVERY == 0 or at.step in (1, 2, run.prepared.config.train.steps)
    return Record(
        step=at.step,
        consumed=at.consumed,
        loss=done.loss,
        lr=done.lr,
        tokens=done.tokens,
        seconds=seconds,
        tokens_per_s=done.tokens / seconds,
        mfu=mfu,
        peak_flops=run.peak.flops,
        sent_bytes=done.bytes,
        grad_norm=done.grad_norm,
        skipped=done.skipped,
        memory_bytes=run.engine.memory() if look else None,
        expert_loads=loads.computed,
        dropped=loads.dropped,
        gate_entropy=loads.entropy,
    )


def tell(run: Run, record: Record) -> None:
    """Record and show a step, on the first rank."""
    run.progress.step(record)
    if run.metrics is not None:
        run.metrics.write(record)


def next_token_logits(run: Run) -> NextToken:
    """The trained model as a function to the next token's logits, the same on all ranks."""
    engine, size = run.engine, run.prepared.vocabulary.size
    # rows of the model beyond the vocabulary are never sampled
    like_V = torch.zeros(size, device=engine.world.device)

    def after(seen: Sequence[int]) -> Tensor:
        seen_BT = torch.tensor([seen], device=like_V.device)
        return engine.outputs(
            lambda model: logits(model, seen_BT)[0, -1, :size].float(), like_V
        ).cpu()

    return after


def sample_text(run: Run, console: Console | None) -> str:
    """The sample; none if `sample.tokens` is 0, or a default and parameters are on a disk."""
    prepared, how = run.prepared, run.prepared.config.sample
    if not how.tokens:
        return ""
    if prepared.plan.states.param_tier == "disk" and "tokens" not in how.model_fields_set:
        why = f"no sample: each of its {how.tokens} tokens would read all parameters from the disk"
        say(f"{why}; --set sample.tokens=8 makes a short one", run.engine.world, console)
        return ""
    seed, window = prepared.config.train.seed, prepared.corpus.sequence
    with run.disk.outside_of_steps():
        return visible(sample(next_token_logits(run), prepared.vocabulary, window, how, seed))


def own_cost(run: Run, *, loaded: bool) -> Cost:
    """The memory of this rank and the traffic of its last step, measured and predicted.

    Only measured without a step of this program, or for a model whose forward reads values.
    """
    engine, last = run.engine, run.last
    on_host = engine.world.device.type == "cpu"
    process = process_memory(run.before_bytes, None, on_host=on_host)
    measured = Cost(engine.memory(), {}, engine.measured_bytes(), {}, process=process)
    if last.share is None:
        return measured
    try:
        found = prediction_of(run.prepared, engine, last.share)
    except InputError:
        return measured
    process = process_memory(run.before_bytes, found, on_host=on_host)
    train, before = run.prepared.config.train, engine.steps - 1
    sent = found.in_step(
        engine.steps_run - 1,
        loaded=loaded,
        done=engine.steps - engine.steps_run,
        skipped=last.skipped_before,
        flushed=is_due(before, train.eval_every) or is_due(before, train.save_every),
    )
    between = found.bytes_between
    known = {kind: n for kind, n in by_kind(sent).items() if kind not in between}
    return Cost(measured.memory, found.memory, measured.sent, known, between, process)


def finish(run: Run, began: Position, stopped: bool, console: Console | None) -> Summary | None:
    """Make the sample and collect the costs (all ranks), then write the report (rank 0)."""
    prepared, engine = run.prepared, run.engine
    config = prepared.config
    text = "" if stopped else sample_text(run, console)
    recording = run.tracing.gather_recording()
    with run.disk.outside_of_steps():
        costs = all_gather_object(own_cost(run, loaded=began.step > 0), engine.world)
    disk = disk_line(run.disk)
    if engine.world.rank != 0:
        return None
    summary = Summary(
        config=config,
        plan=str(prepared.plan),
        ranks=engine.world.size,
        parameters=parameters(prepared.sizes),
        packed=prepared.corpus.packed,
        records=metrics.read(config.folder),
        unigram=run.unigram,
        began=began.step,
        peak_flops=run.peak.flops,
        costs=costs,
        baseline=ddp_baseline(prepared.sizes, prepared.plan, optimizer_of(prepared.config.train)),
        sample=text,
        stopped=stopped,
        recording=recording,
        step=run.memory.series(prepared),
    )
    if text:
        (config.folder / "sample.txt").write_text(text, encoding="utf-8")
    path = report.write(summary)
    screen = console or Console(highlight=False)
    if text:
        screen.print(Panel(Text(text), title="sample"))
    screen.print(report.table(summary))
    if disk:
        screen.print(disk, soft_wrap=True)
    screen.print(f"report: {path}", soft_wrap=True)
    return summary
