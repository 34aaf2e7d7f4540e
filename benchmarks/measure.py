"""One rank's part of a benchmark: all contenders in the same processes, taking turns.

    build A, build B, ...                     each from a copy of the same weights
    meter A, meter B, ...                     live bytes of a step, not timed
    warm up A, warm up B, ...
    A B C   B C A   C A B   ...               the rounds, each turn between two barriers

A turn's time includes the wait for communication that its last step left in flight; bytes sent even
later are reported. A contender that fails is dropped, with a note.
"""

import copy
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders.contender import Batch, Contender, Loop, Setup, Task, TierBytes
from benchmarks.contenders.roster import ROSTER
from benchmarks.meters import LOOPBACK, LiveBytes, communication_bytes, sent_bytes
from shardwise.models import gpt
from shardwise.models.registry import of_sizes

BATCHES = 4  # different batches, used in turn
QUIET_S = 0.03  # how long the interface is watched after a turn


@dataclass
class Record:
    """One rank's measurements of one contender, per step; lists have one entry per round.

    `wire` is the bytes sent through the interface, without those of the two barriers, and through
    shared memory. `late` is the bytes sent after the clock had stopped.
    """

    name: str
    step_s: list[float] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    loss: float | None = None
    note: str = ""
    buffers_bytes: int | None = None
    tiers: TierBytes | None = None


@dataclass
class Runner:
    """A contender in a run: its training loop, and the number of steps so far."""

    contender: Contender
    record: Record
    batches: list[Batch]
    live: LiveBytes = field(default_factory=LiveBytes)
    communication: LiveBytes = field(default_factory=communication_bytes)
    loop: Loop | None = None
    steps: int = 0

    def advance(self, steps: int) -> None:
        assert self.loop is not None
        for _ in range(steps):
            self.record.loss = self.loop.step(self.batches[self.steps % len(self.batches)])
            self.steps += 1
        self.loop.settle()


def measure(task: Task) -> list[Record]:
    """Run the task on this rank; the default process group must be initialised.

    Returns a record for each contender, in order.
    """
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trainable = of_sizes(task.size, task.config)
    batches = [trainable.batch(task.rows, seed) for seed in range(BATCHES)]
    original = trainable.build()
    setup = Setup(gpt.loss, gpt.Block, ranks, torch.device("cpu"))
    runners: list[Runner] = []
    for name in task.contenders:
        contender = ROSTER[name]
        own = batches if contender.whole_batch else [_part(each, rank, ranks) for each in batches]
        runners.append(Runner(contender, Record(name, note=contender.note), own))
    for runner in runners:
        _build(runner, original, setup)
    for runner in _racing(runners):
        _attempt(runner, lambda runner=runner: _metered(runner))
    for runner in _racing(runners):
        _attempt(runner, lambda runner=runner: runner.advance(task.warm_up))
    _race(task, runners)
    return [runner.record for runner in runners]


def _part(batch: Batch, rank: int, ranks: int) -> Batch:
    """A rank's sequences of a batch, copied, since live bytes are counted by storage."""
    return {key: value.chunk(ranks)[rank].clone() for key, value in batch.items()}


def _race(task: Task, runners: list[Runner]) -> None:
    idle = _barrier_bytes()
    for index in range(task.rounds):
        _progress(f"{task.size}: round {index + 1} of {task.rounds}")
        racing = _racing(runners)
        start = index % max(1, len(racing))
        for runner in racing[start:] + racing[:start]:
            _attempt(runner, lambda runner=runner: _turn(task, runner, idle))


def _turn(task: Task, runner: Runner, idle: float) -> None:
    """One contender's turn of a round."""
    gc.collect()  # do not collect one contender's cycles on another's clock
    gc.disable()
    dist.barrier()
    assert runner.loop is not None
    shared_bytes = runner.loop.shared_bytes
    sent, shared, began = sent_bytes(LOOPBACK), shared_bytes(), time.perf_counter()
    failure: Exception | None = None
    try:
        runner.advance(task.steps)
    except Exception as error:  # noqa: BLE001 - raised below, after the barrier
        failure = error
    dist.barrier()
    elapsed_s = time.perf_counter() - began
    over = sent_bytes(LOOPBACK)
    time.sleep(QUIET_S)
    late = sent_bytes(LOOPBACK) - over
    gc.enable()
    if failure is not None:
        raise failure
    shares = task.steps * dist.get_world_size()  # the interface carries the traffic of all ranks
    runner.record.step_s.append(elapsed_s / task.steps)
    handed = (shared_bytes() - shared) / task.steps
    runner.record.wire.append((over - sent - idle) / shares + handed)
    runner.record.late.append(late / shares)


def _barrier_bytes() -> float:
    """The bytes of a pair of barriers."""
    costs: list[int] = []
    for _ in range(9):
        dist.barrier()
        sent = sent_bytes(LOOPBACK)
        dist.barrier()
        costs.append(sent_bytes(LOOPBACK) - sent)
    return statistics.median(costs)


def _build(runner: Runner, original: torch.nn.Module, setup: Setup) -> None:
    contender = runner.contender
    if contender.missing:
        runner.record.note = f"{contender.package} is not installed"
        return

    def build() -> None:
        with runner.live, runner.communication:
            runner.loop = contender.build(copy.deepcopy(original), setup)

    _progress(f"building {contender.name}")
    _attempt(runner, build)


def _metered(runner: Runner) -> None:
    """Meter the second of two steps, which has the optimizer's state from its start."""
    runner.live.watch(runner.batches)
    if runner.loop is not None:
        runner.live.on_host = runner.loop.on_host
        runner.live.leave_out_host()
    with runner.live, runner.communication:
        runner.advance(1)
        runner.live.peak_bytes = runner.communication.peak_bytes = 0
        runner.advance(1)
    runner.record.peak_bytes = runner.live.peak_bytes
    if runner.loop is not None and runner.loop.tiers is not None:
        runner.record.tiers = runner.loop.tiers()
    if runner.contender.package == "torch":
        runner.record.buffers_bytes = runner.communication.peak_bytes  # other packages: not known


def _racing(runners: list[Runner]) -> list[Runner]:
    return [runner for runner in runners if runner.loop is not None]


def _attempt(runner: Runner, action: Callable[[], Any]) -> None:
    """Run `action`; if it fails on any rank, drop the contender on all, with a note."""
    failure = ""
    with _peers_quiet():
        try:
            action()
        except Exception as error:  # noqa: BLE001 - becomes the note of the contender's row
            failure = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
    failures: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if any(failures):
        runner.loop = None
        runner.record.step_s, runner.record.wire, runner.record.late = [], [], []
        runner.record.note = next(text for text in failures if text)


@contextmanager
def _peers_quiet() -> Iterator[None]:
    """Silence the peers' deprecation warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _progress(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)
