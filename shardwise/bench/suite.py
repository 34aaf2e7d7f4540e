"""This file is how a suite is run: its contenders at each size, on so many ranks.

tiny     1M parameters: what is around the computation shows
small    33M parameters: computation and communication weigh about the same
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from shardwise.bench.contender import Task
from shardwise.bench.link import between_hosts
from shardwise.bench.measure import Record, measure
from shardwise.bench.roster import choose
from shardwise.bench.table import Line, lines
from shardwise.comm.launch import spawn
from shardwise.core.errors import bad
from shardwise.models.gpt import SIZES
from shardwise.models.trainable import nearest

#: Rounds, and steps at a stretch within a turn. Short steps need more of both.
LENGTHS: Final = {"small": (8, 2), "tiny": (16, 5)}

#: How long a rank waits for another that has failed within a contender's code.
PATIENCE: Final = timedelta(minutes=3)


def plan_tasks(
    suite: str, sizes: Sequence[str], ranks: int, rounds: int | None, contenders: Sequence[str]
) -> list[Task]:
    """What is to be run, checked. Raises InputError for what cannot be."""
    chosen = choose(suite, list(contenders))
    tasks: list[Task] = []
    for size in sizes or LENGTHS:
        if size not in LENGTHS:
            close = nearest(size, list(LENGTHS), 1)[0]
            raise bad(f'the size "{size}"', ", ".join(LENGTHS), f"--size {close}")
        usual, steps = LENGTHS[size]
        count = usual if rounds is None else rounds
        tasks.append(Task(size, SIZES[size], chosen, rounds=count, steps=steps))
    for task in tasks:
        if ranks < 2 or task.rows % ranks:
            raise bad(f"{ranks} ranks", f"2 or more that divide {task.rows} sequences", "--ranks 2")
        if task.rounds < 1:
            raise bad(f"{task.rounds} repeats", "1 or more", "--repeats 5")
    return tasks


def run(tasks: Sequence[Task], ranks: int, link: str | None = None) -> list[Line]:
    """The rows of all tasks, on local processes, or with a `link` between two hosts.

    Raises InputError where the link cannot be made, RankError where a contender ends a process.
    """
    found: list[Line] = []
    for task in tasks:
        if link is None:
            by_rank = spawn(rank, ranks=ranks, args=(task,))
        else:
            by_rank = between_hosts(replace(task, interface="eth0", shared=False), link)
        found += lines(task, by_rank)
    return found


def rank(task: Task) -> list[Record]:
    """One rank of a task, in a process that a launcher has started."""
    dist.init_process_group("gloo", timeout=PATIENCE)
    return measure(task)
