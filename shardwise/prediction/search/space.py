"""The plans that a search tries on a number of ranks.

    tp           sizes that divide a host, with sp
    pp           sizes up to MOST_STAGES, each with 1f1b, interleaved in two chunks, and zb-h1
    cp           for rows of LONG positions and more, inside a host
    ep           for models with experts, inside a host
    dp           the ranks left over
    rows         ddp, zero1, zero2, zero3
    recompute    nothing, selective, full
    offload      optim, then param; only where no plan without it fits
    microbatch   1, 2 or 4 rows; their number follows from the batch

All in bf16. Every rank has equally many rows.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Final, NamedTuple

from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan

MOST_STAGES: Final = 64
LONG: Final = 32_768
MICROBATCH_ROWS: Final = (1, 2, 4)
SCHEDULES: Final = ("1f1b:{}", "interleaved:{}x2", "zb-h1:{}")
STATES: Final = ("zero3", "zero2", "zero1", "ddp")
RECOMPUTED: Final = ("", "recompute:selective", "recompute:full")

#: What offload moves to host memory, the least first.
OFFLOADED: Final = ("optim", "param")


class PlanTask(NamedTuple):
    """What is to be planned: the ranks, hosts of `host` devices, and the model's batch.

    `batch` counts the rows of a step on all ranks, `positions` those of a row (0: no text).
    """

    ranks: int
    host: int
    batch: int
    positions: int = 0
    experts: int = 1


class Candidate(NamedTuple):
    """A plan, and the rows of each of its microbatches."""

    plan: Plan
    rows: int


def candidates(task: PlanTask) -> Iterator[Candidate]:
    """The plans for a task.

    Raises InputError for ranks that do not fill hosts, and a batch that no plan divides.
    """
    if task.ranks > task.host and task.ranks % task.host:
        hosts = -(-task.ranks // task.host) * task.host
        given = f"{task.ranks} ranks on hosts of {task.host} devices"
        raise bad(given, f"at most {task.host} ranks, or a multiple of it", f"--ranks {hosts}")
    texts = [each for mesh in meshes(task) for each in _texts(task, mesh)]
    if not texts:
        least = task.ranks // min(task.ranks, task.host * MOST_STAGES)
        given = f"a batch of {task.batch} rows on {task.ranks} ranks, which no plan divides"
        allowed = f"a multiple of the data ranks; the fewest data ranks of a plan are {least}"
        raise bad(given, allowed, f"--batch {task.ranks}")
    yield from (Candidate(Plan.parse(text), rows) for text, rows in texts)


def offloaded(candidate: Candidate, word: str) -> Candidate:
    """The same plan with states in host memory."""
    return candidate._replace(plan=replace(candidate.plan, offload=word))


class MeshSizes(NamedTuple):
    """The sizes of the axes of a plan."""

    pp: int
    data: int
    cp: int
    ep: int
    tp: int


def meshes(task: PlanTask) -> list[MeshSizes]:
    """The axes whose product is the number of ranks, with at least a row on every data rank."""
    inside = divisors(task.host)
    contexts = inside if task.positions >= LONG else [1]
    experts = [ep for ep in inside if task.experts % ep == 0]
    stages = [pp for pp in divisors(task.ranks) if pp <= MOST_STAGES]
    found = list[MeshSizes]()
    for tp, pp, cp, ep in product(inside, stages, contexts, experts):
        data, over = divmod(task.ranks, tp * pp * cp)
        if not over and data * cp % ep == 0 and task.batch % data == 0:
            found.append(MeshSizes(pp, data, cp, ep, tp))
    return found


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _texts(task: PlanTask, mesh: MeshSizes) -> Iterator[tuple[str, int]]:
    """The texts of the plans of a mesh, each with the rows of a microbatch."""
    own = task.batch // mesh.data
    axes = " ".join(
        [
            *([f"pp{mesh.pp}"] if mesh.pp > 1 else []),
            f"dp{mesh.data}",
            *([f"cp{mesh.cp}"] if mesh.cp > 1 else []),
            *([f"ep{mesh.ep}"] if mesh.ep > 1 else []),
            *([f"tp{mesh.tp} sp"] if mesh.tp > 1 else []),
        ]
    )
    states = STATES if mesh.data * mesh.cp > 1 else ("ddp",)
    for rows in (rows for rows in MICROBATCH_ROWS if own % rows == 0):
        runs = own // rows
        cuts = [each.format(runs) for each in SCHEDULES] if mesh.pp > 1 else [f"accumulate:{runs}"]
        for row, cut, again in product(states, cuts, RECOMPUTED):
            yield f"{axes} {row} {cut} {again} bf16", rows
