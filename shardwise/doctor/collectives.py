"""Checks the collectives that a step uses, and fits a line to their times by size.

Rank r of n holds [0, 1, ..., n-1] + r.

    n = 4     rank 0  0 1 2 3        all-reduce         6 10 14 18   on every rank
              rank 1  1 2 3 4        reduce-scatter     6 | 10 | 14 | 18
              rank 2  2 3 4 5        all-gather         0 1 2 3  1 2 3 4  2 3 4 5  3 4 5 6
              rank 3  3 4 5 6        broadcast from 3   3 4 5 6

All-to-all of these would return each rank its own vector, so there rank r holds
[0, 1, ..., n-1] + 10 r, and gets [r, 10 + r, 20 + r, ...].

A time is latency + bytes / bandwidth, with the bytes of the ledger, so that the bandwidths of
different collectives can be compared (Hockney, "The communication challenge for MPP", 1994).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from shardwise.comm import move
from shardwise.comm.link_times import settle
from shardwise.comm.world import Axis


@dataclass(frozen=True)
class Example:
    """The example on this rank: its own vector `x`, and the vectors of all ranks as rows."""

    axis: Axis
    x: Tensor
    everyone: Tensor

    @classmethod
    def on(cls, axis: Axis, device: torch.device) -> "Example":
        """The example on the ranks of `axis`."""
        first = torch.arange(axis.size, dtype=torch.float64, device=device)
        return cls(axis, first + axis.rank, first + first.unsqueeze(1))

    @property
    def sums(self) -> Tensor:
        """[6, 10, 14, 18] of four ranks."""
        return self.everyone.sum(0)


Found = tuple[Tensor, Tensor]
Check = Callable[[Example], Found]


def _mine(e: Example, whole: Tensor) -> Tensor:
    return whole[e.axis.rank : e.axis.rank + 1]


def _exchanged(e: Example) -> Found:
    n, rank = e.axis.size, e.axis.rank
    first = torch.arange(n, dtype=torch.float64, device=e.x.device)
    ones = [1] * n
    return move.all_to_all(first + 10 * rank, e.axis, ones, ones), 10 * first + rank


def _to_next(x: Tensor, axis: Axis) -> Tensor:
    """Each rank sends to the next, and the last to the first."""
    n, rank = axis.size, axis.rank
    sending = move.begin_send(x, axis, (rank + 1) % n)
    out = torch.empty_like(x)
    move.begin_receive(out, axis, (rank - 1) % n).wait()
    sending.wait()
    return out


CHECKS: Final[dict[str, Check]] = {
    "all_reduce": lambda e: (move.all_reduce(e.x.clone(), e.axis), e.sums),
    "reduce_scatter": lambda e: (move.reduce_scatter(e.x, e.axis), _mine(e, e.sums)),
    "all_gather": lambda e: (torch.stack(move.all_gather(e.x, e.axis)), e.everyone),
    "all_to_all": _exchanged,
    "broadcast": lambda e: (move.broadcast(e.x.clone(), e.axis, e.axis.size - 1), e.everyone[-1]),
    "send and receive": lambda e: (
        _to_next(e.x, e.axis),
        e.everyone[(e.axis.rank - 1) % e.axis.size],
    ),
}


def check(axis: Axis, device: torch.device) -> dict[str, str]:
    """Make every check on `axis`; returns by name the problem, or ""."""
    example = Example.on(axis, device)
    return {name: _verdict(one, example) for name, one in CHECKS.items()}


def _verdict(one: Check, example: Example) -> str:
    found, wanted = one(example)
    if torch.equal(found, wanted):
        return ""
    return f"gave {found.tolist()} instead of {wanted.tolist()}"


# --- times --------------------------------------------------------------------------------

#: Elements (fp32) of a rank's tensor: 4 KiB to 16 MiB.
SIZES: Final = tuple(2**power for power in range(10, 23, 2))
REPEATS: Final = 7


@dataclass(frozen=True)
class Timing:
    """One collective on one axis: the bytes that a rank sends, and the time of the slowest."""

    axis: str
    collective: str
    sent_bytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """seconds = latency_s + sent_bytes / bytes_per_s.

    `residual` is the root mean square of the relative errors; `bytes_per_s` None if the time does
    not grow with the bytes.
    """

    axis: str
    collective: str
    latency_s: float
    bytes_per_s: float | None
    residual: float

    def seconds(self, sent_bytes: float) -> float:
        """The time by the line."""
        return self.latency_s + (sent_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


def _all_gather(x: Tensor, axis: Axis) -> object:
    return move.all_gather(x, axis)


def _exchange(x: Tensor, axis: Axis) -> object:
    counts = [len(x) // axis.size] * axis.size
    return move.all_to_all(x[: sum(counts)], axis, counts, counts)


#: The timed operations; `x` is a vector.
TIMED: Final[dict[str, Callable[[Tensor, Axis], object]]] = {
    "all_reduce": move.all_reduce,
    "reduce_scatter": lambda x, axis: move.reduce_scatter(x[: len(x) - len(x) % axis.size], axis),
    "all_gather": _all_gather,
    "all_to_all": _exchange,
    "broadcast": move.broadcast,
    "send": _to_next,
}


def measure(axis: Axis, device: torch.device, sizes: Sequence[int] = SIZES) -> list[Timing]:
    """Time every collective of `TIMED` on `axis`.  All ranks of the axis call it."""
    found: list[Timing] = []
    for numel in sizes:
        x = torch.zeros(numel, device=device)
        for name, act in TIMED.items():
            before = axis.ledger.sent_bytes()
            act(x, axis)  # the first call may open connections
            sent_bytes = axis.ledger.sent_bytes() - before
            own = [_once(act, x, axis) for _ in range(REPEATS)]
            slowest = move.all_reduce(torch.tensor(own, device=device), axis, "max")
            seconds = lower_quartile(slowest.tolist())
            found.append(Timing(axis.name, name, sent_bytes, seconds))
    return found


def lower_quartile(times: Sequence[float]) -> float:
    """A quarter of the times are shorter: other programs only add time."""
    return sorted(times)[len(times) // 4]


def _once(act: Callable[[Tensor, Axis], object], x: Tensor, axis: Axis) -> float:
    move.barrier(axis)
    settle(x.device)
    began = time.perf_counter()
    act(x, axis)
    settle(x.device)
    return time.perf_counter() - began


def fit(timings: Sequence[Timing]) -> Fit:
    """The line with the least relative squared error through the timings of one collective.

    Neither latency nor 1 / bandwidth is negative: if the best line has a negative one, it is 0.
    """
    t = np.array([each.seconds for each in timings])
    x = np.array([float(each.sent_bytes) for each in timings])
    columns, errors = np.stack([1 / t, x / t], axis=1), list[tuple[float, float, float]]()
    for kept in ([0, 1], [0], [1]):
        line = np.zeros(2)
        line[kept] = np.linalg.lstsq(columns[:, kept], np.ones(len(t)), rcond=None)[0]
        error = float(np.sqrt(np.mean((columns @ line - 1) ** 2))) if min(line) >= 0 else np.inf
        errors.append((error, float(line[0]), float(line[1])))
    error, latency, per_byte = min(errors)
    rate = 1 / per_byte if per_byte else None
    return Fit(timings[0].axis, timings[0].collective, latency, rate, error)


def slowest(by_rank: Sequence[Sequence[Timing]]) -> list[Timing]:
    """The longest time over the ranks for each timing; all ranks have them in the same order."""
    return [
        replace(
            same[0],
            sent_bytes=max(each.sent_bytes for each in same),
            seconds=max(each.seconds for each in same),
        )
        for same in zip(*by_rank, strict=True)
    ]


def fits(timings: Sequence[Timing]) -> list[Fit]:
    """A line for each axis and collective."""
    groups: dict[tuple[str, str], list[Timing]] = {}
    for each in timings:
        groups.setdefault((each.axis, each.collective), []).append(each)
    return [fit(group) for group in groups.values()]
