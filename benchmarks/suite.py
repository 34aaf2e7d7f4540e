"""Running a suite: its contenders at each size.

tiny     1M parameters: shows the overhead around the computation
small    33M parameters: computation and communication take about the same time

In the suite `layers` the vocabulary is larger, so that most weights are in the embedding and head.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from benchmarks.contenders.contender import Task
from benchmarks.contenders.roster import ROSTER, choose, references
from benchmarks.measure import Record, measure
from benchmarks.table import Line, as_text, lines
from shardwise.comm.start.launch import spawn
from shardwise.core.errors import bad
from shardwise.core.schedule.library import build
from shardwise.core.tools.arguments import choice, integer
from shardwise.models.gpt import SIZES, GPTConfig

#: Rounds, and steps per turn. Short steps need more of both.
LENGTHS: Final = {"small": (8, 2), "tiny": (16, 5)}

#: Sizes without --size, if not all: 64 experts of `small` have 0.5 billion parameters.
USUAL: Final = {"experts": ("tiny",)}

#: The vocabulary of the suite `layers` relative to the size's.
VOCABULARY: Final = {"tiny": 16, "small": 4}

#: The most rounds of a suite.
MOST_REPEATS: Final = 1000

#: How long a rank waits for another rank that failed in a contender's code.
PATIENCE: Final = timedelta(minutes=3)


def plan_tasks(
    suite: str, sizes: Sequence[str], ranks: int, rounds: int | None, contenders: Sequence[str]
) -> list[Task]:
    """The tasks to run. Raises InputError for wrong arguments."""
    chosen = choose(suite, list(contenders))
    integer("--nproc", ranks, 2, 2)
    tasks: list[Task] = []
    for size in sizes or USUAL.get(suite, tuple(LENGTHS)):
        choice("--size", size, LENGTHS)
        usual, steps = LENGTHS[size]
        count = usual if rounds is None else rounds
        whole = Task(size, _config(suite, size), chosen, rounds=count, steps=steps)
        tasks += [replace(whole, contenders=heat) for heat in heats(suite, chosen)]
    for task in tasks:
        if suite == "pipeline":
            _piped(task, ranks, named=bool(contenders))
        elif task.rows % ranks:
            raise bad(f"{ranks} ranks", f"2 or more that divide {task.rows} sequences", "--nproc 2")
        integer("--repeats", task.rounds, 1, 5, MOST_REPEATS)
    return tasks


def _config(suite: str, size: str) -> GPTConfig:
    config = SIZES[size]
    times = VOCABULARY[size] if suite == "layers" else 1
    return replace(config, vocabulary=times * config.vocabulary)


def _piped(task: Task, ranks: int, named: bool) -> None:
    """Raise InputError for a pipeline that cannot run on `ranks` ranks.

    A schedule that does not allow them raises only if it was named; otherwise its row says so.
    """
    words = [ROSTER[name].row for name in task.contenders if named]
    stages = max([ranks, *(len(build(word, ranks).home) for word in words)])
    if stages > task.config.layers:
        raise bad(
            f"{stages} stages of a model with {task.config.layers} layers",
            f"at most {task.config.layers}",
            "--nproc 2",
        )


def heats(suite: str, chosen: Sequence[str]) -> list[tuple[str, ...]]:
    """The contenders that run in the same processes: each reference with those compared to it.

    With one reference these are all contenders; the pairs of `pipeline` run one after another, so
    that at most two models are in memory.
    """
    found: dict[str, list[str]] = {}
    for name in chosen:
        found.setdefault(references(suite, name)[-1], []).append(name)
    return [tuple(names) for names in found.values()]


def run(tasks: Sequence[Task], ranks: int) -> list[Line]:
    """Run all tasks on local processes; returns the rows.

    With several tasks, each one's rows are printed to stderr as soon as it has finished.

    Raises RankError if a contender ends a process.
    """
    found: list[Line] = []
    for task in tasks:
        rows = lines(task, spawn(rank, ranks=ranks, args=(task,)))
        if len(tasks) > 1:
            print(as_text(rows), file=sys.stderr, flush=True)
        found += rows
    return found


def rank(task: Task) -> list[Record]:
    """Run one rank of a task, in a process started by the launcher."""
    dist.init_process_group("gloo", timeout=PATIENCE)
    return measure(task)
