"""This file is one rank's part of a benchmark: everyone in the same processes, turn by turn.

    build A, build B, ...                     each from a copy of the same weights
    meter A, meter B, ...                     one step each, live bytes counted, not timed
    warm up A, warm up B, ...
    A B C   B C A   C A B   ...               the rounds, each turn between two barriers

A turn's time is from the barrier before it to the barrier after it, and communication left in
flight by its last step is waited for on the clock; what moves even later is counted, and said. A
contender that fails leaves a note and drops out.
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

from shardwise.bench.contender import Batch, Contender, Loop, Setup, Task
from shardwise.bench.live import Live
from shardwise.bench.roster import ROSTER
from shardwise.comm.interface import sent_bytes
from shardwise.models import gpt
from shardwise.models.registry import of_gpt

BATCHES = 4  # different batches, used in turn
QUIET_S = 0.03  # how long the wire is watched after a turn


@dataclass
class Record:
    """What one rank measured of one contender: a number for each round, seconds and bytes a step.

    `wire` is bytes that left through the interface, less what a pair of barriers costs, and through
    shared memory, as they were copied; `late` is bytes that left it when the clock had stopped.
    """

    name: str
    step_s: list[float] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    loss: float | None = None
    note: str = ""


@dataclass
class Runner:
    """A contender in the race: its loop, and how many steps it has made on the batches in turn."""

    contender: Contender
    record: Record
    batches: list[Batch]
    live: Live = field(default_factory=Live)
    loop: Loop | None = None
    steps: int = 0

    def advance(self, steps: int) -> None:
        """Makes that many training steps."""
        assert self.loop is not None
        for _ in range(steps):
            self.record.loss = self.loop.step(self.batches[self.steps % len(self.batches)])
            self.steps += 1
        self.loop.settle()


def measure(task: Task) -> list[Record]:
    """Runs the task on this rank; the process group of all ranks is initialised.

    Returns a record for each contender of the task, in its order.
    """
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trainable = of_gpt(task.size, task.config)
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
    """A rank's sequences of a batch, in storage of their own, for storages are what is counted."""
    return {key: value.chunk(ranks)[rank].clone() for key, value in batch.items()}


def _race(task: Task, runners: list[Runner]) -> None:
    idle = _barrier_bytes(task)
    for index in range(task.rounds):
        _progress(f"{task.size}: round {index + 1} of {task.rounds}")
        racing = _racing(runners)
        start = index % max(1, len(racing))
        for runner in racing[start:] + racing[:start]:
            _attempt(runner, lambda runner=runner: _turn(task, runner, idle))


def _turn(task: Task, runner: Runner, idle: float) -> None:
    """One contender's turn of a round."""
    gc.collect()  # cycles left by one contender are not collected on another's clock
    gc.disable()
    dist.barrier()
    assert runner.loop is not None
    shared_bytes = runner.loop.shared_bytes
    sent, shared, began = sent_bytes(task.interface), shared_bytes(), time.perf_counter()
    failure: Exception | None = None
    try:
        runner.advance(task.steps)
    except Exception as error:  # noqa: BLE001 - raised below: the other ranks come to the barrier
        failure = error
    dist.barrier()
    elapsed_s = time.perf_counter() - began
    over = sent_bytes(task.interface)
    time.sleep(QUIET_S)
    late = sent_bytes(task.interface) - over
    gc.enable()
    if failure is not None:
        raise failure
    shares = task.steps * (dist.get_world_size() if task.shared else 1)
    runner.record.step_s.append(elapsed_s / task.steps)
    handed = (shared_bytes() - shared) / task.steps
    runner.record.wire.append((over - sent - idle) / shares + handed)
    runner.record.late.append(late / shares)


def _barrier_bytes(task: Task) -> float:
    """What a turn sends that is not the contender's: the barriers at its ends."""
    costs: list[int] = []
    for _ in range(9):
        dist.barrier()
        sent = sent_bytes(task.interface)
        dist.barrier()
        costs.append(sent_bytes(task.interface) - sent)
    return statistics.median(costs)


def _build(runner: Runner, original: torch.nn.Module, setup: Setup) -> None:
    contender = runner.contender
    if contender.missing:
        runner.record.note = f"{contender.package} is not installed"
        return

    def build() -> None:
        with runner.live:
            runner.loop = contender.build(copy.deepcopy(original), setup)

    _progress(f"building {contender.name}")
    _attempt(runner, build)


def _metered(runner: Runner) -> None:
    """Two steps under the meter: the second has the optimizer's state from its start."""
    runner.live.watch(runner.batches)
    with runner.live:
        runner.advance(1)
        runner.live.peak_bytes = 0
        runner.advance(1)
    runner.record.peak_bytes = runner.live.peak_bytes


def _racing(runners: list[Runner]) -> list[Runner]:
    return [runner for runner in runners if runner.loop is not None]


def _attempt(runner: Runner, action: Callable[[], Any]) -> None:
    """Runs `action`; when it fails on any rank, the contender is out on all, with a note."""
    failure = ""
    with _peers_quiet():
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a peer does wrong is its row's note
            failure = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
    failures: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if any(failures):
        runner.loop = None
        runner.record.step_s, runner.record.wire, runner.record.late = [], [], []
        runner.record.note = next(text for text in failures if text)


@contextmanager
def _peers_quiet() -> Iterator[None]:
    """The peers' deprecations are theirs to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _progress(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)
