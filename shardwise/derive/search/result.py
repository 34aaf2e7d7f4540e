"""What a search tries on a number of ranks, and what it found: plans in the order of their step's
time.

    tp           sizes that divide a host, with sp
    pp           sizes up to MOST_STAGES, each with 1f1b, interleaved in two chunks, and zb-h1
    cp           for rows of LONG positions and more, inside a host
    ep           for models with experts, inside a host
    dp           the ranks left over
    rows         ddp, zero1, zero2, zero3
    recompute    nothing, selective, full
    offload      optim, then param; only where no plan without it fits
    microbatch   1, 2 or 4 rows; their number follows from the batch

All in bf16.  Every rank has equally many rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, NamedTuple

from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.prediction.cluster import Cluster
from shardwise.prediction.time.step_time import StepTime

# --- the plans that a search tries ----------------------------------------------------------------

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
    `batch` counts the rows of a step on all ranks, `positions` their length (0: no text).
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
    """The plans for a task. Raises InputError if ranks do not fill hosts or divide the batch."""
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
    return [each for each in range(1, number + 1) if number % each == 0]


def _texts(task: PlanTask, mesh: MeshSizes) -> Iterator[tuple[str, int]]:
    """The texts of the plans of a mesh, each with the rows of a microbatch."""
    own = task.batch // mesh.data
    sizes = {"pp": mesh.pp, "dp": mesh.data, "cp": mesh.cp, "ep": mesh.ep, "tp": mesh.tp}
    axes = " ".join(f"{axis}{n}" for axis, n in sizes.items() if n > 1 or axis == "dp")
    axes += " sp" * (mesh.tp > 1)
    states = STATES if mesh.data * mesh.cp > 1 else ("ddp",)
    for rows in (rows for rows in MICROBATCH_ROWS if own % rows == 0):
        runs = own // rows
        cuts = [each.format(runs) for each in SCHEDULES] if mesh.pp > 1 else [f"accumulate:{runs}"]
        for row, cut, again in product(states, cuts, RECOMPUTED):
            yield f"{axes} {row} {cut} {again} bf16", rows


@dataclass(frozen=True)
class RankedPlan:
    """A plan that fits.

    rows        of a microbatch
    peak_bytes  the most that a rank stores on its device
    sent_bytes  that rank 0 sends in a step, by axis
    kept_bytes  the most that autograd keeps on a rank
    """

    plan: Plan
    rows: int
    time: StepTime
    peak_bytes: int
    sent_bytes: Mapping[str, int]
    kept_bytes: int

    @property
    def seconds(self) -> float:
        return self.time.seconds

    @property
    def bound(self) -> str:
        """The largest part of the time: "compute", "exposed dp", "bubble" or "update"."""
        parts = self.time.parts
        return max(parts, key=lambda name: parts[name])

    def as_json(self) -> dict[str, Any]:
        found = {"plan": str(self.plan), "bound": self.bound, "device_peak": self.peak_bytes}
        return found | {"bytes": dict(self.sent_bytes), "step_time": self.time.as_json()}


@dataclass(frozen=True)
class RefusedPlan:
    """A plan that cannot run; `over_bytes`: by how much at least it exceeds memory, if it does."""

    plan: Plan
    reason: str
    rows: int = 1
    over_bytes: int = 0


@dataclass(frozen=True)
class SearchResult:
    """The result of a search for a batch of so many rows in a step of all ranks.

    ranked   the plans whose time was predicted, the shortest first
    refused  plans that do not fit or cannot run, the nearest to fitting first
    slower   the number of plans that take longer by an estimate, or recompute more than a plan
             that fits
    """

    cluster: Cluster
    ranks: int
    batch: int
    ranked: tuple[RankedPlan, ...]
    refused: tuple[RefusedPlan, ...]
    slower: int = 0

    @property
    def best(self) -> RankedPlan | None:
        return self.ranked[0] if self.ranked else None

    @property
    def nearest(self) -> RefusedPlan | None:
        """The plan that exceeds the memory by least; None if none does."""
        return next((each for each in self.refused if each.over_bytes), None)

    def as_json(self, most: int) -> dict[str, Any]:
        """The first `most` plans, the nearest where nothing fits, and the counts of the others."""
        near = self.nearest if self.best is None else None
        return {
            "ranks": self.ranks,
            "batch": self.batch,
            "ranked": [each.as_json() for each in self.ranked[:most]],
            "refused": len(self.refused),
            "slower": self.slower,
            "nearest": None if near is None else [str(near.plan), near.over_bytes],
        }
