"""How a disk is used: the bytes read and written, and where the time goes.

reads      [====]  [=======]                read_s     while some read is under way
writes        [=====]    [====]             written_s  while some write is
either     [========]  [======]             busy_s     while some request is
a step     [c][w][u][u][w][u][c]            waited_s   while it waits for a request or a buffer
                                            updated_s  while it updates chunks; the rest computes
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

Kind = Literal["read", "written"]
Spending = Literal["waited", "updated"]
_CLOCKS: Final = ("read", "written", "busy", "waited", "updated")


@dataclass(frozen=True)
class Used:
    """Bytes and seconds; `-` gives what was used between two moments."""

    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    written_s: float = 0.0
    busy_s: float = 0.0
    waited_s: float = 0.0
    updated_s: float = 0.0

    def __sub__(self, before: "Used") -> "Used":
        return Used(**{name: value - vars(before)[name] for name, value in vars(self).items()})


@dataclass
class _Clock:
    """The time in which at least one request is under way."""

    seconds: float = 0.0
    requests: int = 0
    since: float = 0.0

    def change(self, by: int, now: float) -> None:
        if self.requests:
            self.seconds += now - self.since
        self.since = now
        self.requests += by


@dataclass
class DiskUse:
    """Counts requests of several threads."""

    counts: dict[str, int] = field(default_factory=lambda: {"read": 0, "written": 0})
    clocks: dict[str, _Clock] = field(default_factory=lambda: {name: _Clock() for name in _CLOCKS})
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def request(self, kind: Kind, count: int) -> Iterator[None]:
        self._change(kind, 1, 0)
        try:
            yield
        finally:
            self._change(kind, -1, count)

    @contextmanager
    def spending(self, what: Spending) -> Iterator[None]:
        """Around a part of a step, on the thread that runs it."""
        self._change(what, 1, 0)
        try:
            yield
        finally:
            self._change(what, -1, 0)

    def _change(self, what: Kind | Spending, by: int, count: int) -> None:
        with self.lock:
            now = time.perf_counter()
            self.clocks[what].change(by, now)
            if what in self.counts:
                self.counts[what] += count
                self.clocks["busy"].change(by, now)

    @property
    def so_far(self) -> Used:
        with self.lock:
            seconds = [self.clocks[name].seconds for name in _CLOCKS]
            return Used(self.counts["read"], self.counts["written"], *seconds)
