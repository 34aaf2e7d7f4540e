"""The times of updates on the host's thread, recorded while `on`."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple


class CopySpan(NamedTuple):
    """What was done, and from when to when in seconds of time.perf_counter."""

    name: str
    start_s: float
    end_s: float


class Spans:
    """Recorded updates, in the order in which they ended."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[CopySpan] = []

    def timed(self, name: str, update: Callable[[], Any]) -> Callable[[], Any]:
        """`update`, which records its time if this is on now."""
        if not self.on:
            return update

        def noted() -> None:
            start_s = time.perf_counter()
            update()
            self.seen.append(CopySpan(name, start_s, time.perf_counter()))

        return noted
