"""The thread of the host that updates states in host memory, and updates that are not visible."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event
from typing import Any, Final

import torch

from shardwise.comm.tiers.disk import Inline
from shardwise.flat.flat_parameter import Flat

#: The delay of a late update after `finish`; and the longest time that it waits for `finish`.
LATE_S: Final = 0.02
MOST_S: Final = 10.0


class HostThread:
    """Makes updates in their order, each followed by `publish` on the thread that runs the step.

    running    updates on the host that are not published, and their flat groups
    late       make delayed updates only when `finish` waits for them, as on a slow host
    """

    def __init__(self, publish: Callable[[Sequence[Flat]], None]) -> None:
        self.publish, self.late = publish, False
        self.running: deque[tuple[Future[Any], Sequence[Flat]]] = deque()
        self.asked = Event()  # `finish` waits

    @contextmanager
    def open(
        self, *, here: bool, later: bool
    ) -> Iterator[Callable[[Callable[[], None], Sequence[Flat]], None]]:
        """Yield a function that makes an update: `here`, or on a thread of its own until the last
        update of the step, with as many threads of OpenMP.

        What is updated on the host is published when another update begins, or at the end; if
        `later`, in `finish`.
        """
        self.finish()
        self.asked = Event()
        own = torch.get_num_threads(), later and self.late
        thread = Inline() if here else ThreadPoolExecutor(1, "shardwise-update", self._begin, own)

        def make(update: Callable[[], None], flats: Sequence[Flat]) -> None:
            self.running.append((thread.submit(update), flats))
            while not later and self.running and self.running[0][0].done():
                self._end_first()

        try:
            yield make
            if not later:
                self.finish()
        finally:
            thread.shutdown(wait=not later, cancel_futures=not later)

    def _begin(self, threads: int, late: bool) -> None:
        torch.set_num_threads(threads)
        if late:
            self.asked.wait(MOST_S)
            time.sleep(LATE_S)

    def _end_first(self) -> None:
        update, flats = self.running.popleft()
        update.result()
        self.publish(flats)

    def wait(self) -> None:
        """Wait for the updates; they stay invisible."""
        wait([update for update, _ in self.running])

    def finish(self) -> None:
        """Make visible what is updated beside the step, or raise the error of an update."""
        self.asked.set()
        try:
            while self.running:
                self._end_first()
        finally:
            self.running.clear()
