"""Checks the collectives that a step uses, and fits a line to their times by size.

Rank r of n holds [r n, r n + 1, ..., r n + n - 1], so that no two elements are equal:

    n = 4     rank 0   0  1  2  3      all-reduce         24 28 32 36   on every rank
              rank 1   4  5  6  7      reduce-scatter     24 | 28 | 32 | 36
              rank 2   8  9 10 11      all-gather         0 1 2 ... 15
              rank 3  12 13 14 15      all-to-all         0 4 8 12 | 1 5 9 13 | 2 6 10 14 | ...

A time is latency + bytes / bandwidth, with the bytes of the ledger, so that the bandwidths of
different collectives can be compared (Hockney, "The communication challenge for MPP", 1994).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.comm import move
from shardwise.comm.link_times import settle
from shardwise.comm.world import Axis, World


class Collective(NamedTuple):
    """`run` takes this rank's vector; `expected` takes the vectors of all ranks, and the rank."""

    run: Callable[[Tensor, Axis], Tensor]
    expected: Callable[[Tensor, int], Tensor]


def _all_to_all(x: Tensor, axis: Axis) -> Tensor:
    counts = [len(x) // axis.size] * axis.size
    return move.all_to_all(x[: sum(counts)], axis, counts, counts)


def _to_next(x: Tensor, axis: Axis) -> Tensor:
    n, rank = axis.size, axis.rank
    sending = move.begin_send(x, axis, (rank + 1) % n)
    out = torch.empty_like(x)
    move.begin_receive(out, axis, (rank - 1) % n).wait()
    sending.wait()
    return out


COLLECTIVES: Final = {
    "all_reduce": Collective(move.all_reduce, lambda everyone, _: everyone.sum(0)),
    "reduce_scatter": Collective(
        lambda x, axis: move.reduce_scatter(x[: len(x) - len(x) % axis.size], axis),
        lambda everyone, rank: everyone.sum(0)[rank : rank + 1],
    ),
    "all_gather": Collective(
        lambda x, axis: move.all_gather_along(x, axis, 0), lambda everyone, _: everyone.flatten()
    ),
    "all_to_all": Collective(_all_to_all, lambda everyone, rank: everyone[:, rank]),
    "broadcast": Collective(
        lambda x, axis: move.broadcast(x, axis, axis.size - 1), lambda everyone, _: everyone[-1]
    ),
    "send": Collective(_to_next, lambda everyone, rank: everyone[rank - 1]),
}


def check(axis: Axis, device: torch.device) -> dict[str, str]:
    """Run every collective on the example; returns by name what is wrong, or ""."""
    n = axis.size
    everyone = torch.arange(n * n, dtype=torch.float64, device=device).view(n, n)
    problems: dict[str, str] = {}
    for name, collective in COLLECTIVES.items():
        result = collective.run(everyone[axis.rank].clone(), axis)
        expected = collective.expected(everyone, axis.rank)
        wrong = f"gave {result.tolist()} instead of {expected.tolist()}"
        problems[name] = "" if torch.equal(result, expected) else wrong
    return problems


# --- times --------------------------------------------------------------------------------

#: Elements (fp32) of a rank's tensor: 4 KiB to 16 MiB.
SIZES: Final = tuple(2**power for power in range(10, 23, 2))
REPEATS: Final = 7


@dataclass(frozen=True)
class Fit:
    """seconds = latency_s + sent_bytes / bytes_per_s. `residual` is the root mean square of the
    relative errors; `bytes_per_s` None if the time does not grow with the bytes.
    """

    axis: str
    collective: str
    latency_s: float
    bytes_per_s: float | None
    residual: float

    def seconds(self, sent_bytes: float) -> float:
        return self.latency_s + (sent_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


@dataclass(frozen=True)
class Timing:
    """One collective on one axis: by size, the most bytes that a rank sends, and the time."""

    axis: str
    collective: str
    sent_bytes: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])

    @property
    def fit(self) -> Fit:
        """The line of least relative squared error; no term is negative."""
        t, x = np.array(self.seconds), np.array(self.sent_bytes, float)
        columns, errors = np.stack([1 / t, x / t], axis=1), list[tuple[float, float, float]]()
        for kept in ([0, 1], [0], [1]):
            line = np.zeros(2)
            line[kept] = np.linalg.lstsq(columns[:, kept], np.ones(len(t)), rcond=None)[0]
            error = float(np.sqrt(np.mean((columns @ line - 1) ** 2))) if min(line) >= 0 else np.inf
            errors.append((error, float(line[0]), float(line[1])))
        error, latency, per_byte = min(errors)
        rate = 1 / per_byte if per_byte else None
        return Fit(self.axis, self.collective, latency, rate, error)


def measure(
    world: World, axis: Axis, device: torch.device, sizes: Sequence[int] = SIZES
) -> list[Timing]:
    """Time every collective on `axis`. All ranks of the world call it, and get the same times."""
    timings = {name: Timing(axis.name, name) for name in COLLECTIVES}
    for numel in sizes:
        x = torch.zeros(numel, device=device)
        for name, collective in COLLECTIVES.items():
            before = axis.ledger.sent_bytes()
            collective.run(x, axis)  # the first call may open connections
            sent_bytes = axis.ledger.sent_bytes() - before
            figures = [sent_bytes, *(_once(collective, x, axis) for _ in range(REPEATS))]
            slowest = torch.tensor(figures, dtype=torch.float64, device=device)
            sent, *times = move.all_reduce(slowest, world.everyone, "max").tolist()
            timings[name].sent_bytes.append(int(sent))
            timings[name].seconds.append(lower_quartile(times))
    return [*timings.values()]


def lower_quartile(times: Sequence[float]) -> float:
    """A quarter of the times are shorter: other programs only add time."""
    return sorted(times)[len(times) // 4]


def _once(collective: Collective, x: Tensor, axis: Axis) -> float:
    move.barrier(axis)
    return timed(lambda: collective.run(x, axis), x.device)


def timed(act: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """The time of a call, in seconds: the mean of some `calls`."""
    settle(device)
    began = time.perf_counter()
    for _ in range(calls):
        act()
    settle(device)
    return (time.perf_counter() - began) / calls
