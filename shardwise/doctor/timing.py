"""The time of collectives by size, and the fitted line: latency + bytes / bandwidth.

The bytes are those of the ledger, so the bandwidths of different collectives can be compared.
(Hockney's model, "The communication challenge for MPP", 1994.)
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


def _around(x: Tensor, axis: Axis) -> None:
    n, rank = axis.size, axis.rank
    sending = move.begin_send(x, axis, (rank + 1) % n)
    move.begin_receive(torch.empty_like(x), axis, (rank - 1) % n).wait()
    sending.wait()


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
    "send": _around,
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
    columns = np.stack([1 / t, x / t], axis=1)
    lines = [np.linalg.lstsq(columns, np.ones(len(t)), rcond=None)[0]]
    for kept in (0, 1):
        only = np.linalg.lstsq(columns[:, [kept]], np.ones(len(t)), rcond=None)[0][0]
        lines.append(np.array([only, 0.0] if kept == 0 else [0.0, only]))
    errors = [
        float(np.sqrt(np.mean((columns @ line - 1) ** 2))) if min(line) >= 0 else np.inf
        for line in lines
    ]
    best = int(np.argmin(errors))
    latency, per_byte = map(float, lines[best])
    rate = 1 / per_byte if per_byte else None
    return Fit(timings[0].axis, timings[0].collective, latency, rate, errors[best])


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
