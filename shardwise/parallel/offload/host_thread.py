"""A thread of the host on which updates run, in order, beside the thread that runs the step.

    main thread    4 arrives  3 arrives  2 arrives  publish 4  1 arrives  publish 3, 2  ...
    host thread               update 4 ...........  update 3, 2 ..........  update 1 ...

`run(items)` hands over what has arrived. The host thread updates all that waits in one call, for a
call of torch's optimizer has a cost of its own; but not more than `most_bytes`, so that what it has
updated can leave. `publish` runs on the main thread once an update is over: at a later `run`, or at
the end of the block. All messages and copies between tiers begin on the main thread, in one order.

(ZeRO-Offload, arXiv 2101.06840, section 4.2: updates overlap with the copies of other units.)
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import torch

T = TypeVar("T")
#: What is updated in one call: with less, calls of torch's optimizer cost a tenth of the update.
MOST_BYTES: Final = 2**26


class HostThread(Generic[T]):
    """The thread lives as long as the `with` block. An error of an update is raised by `run`."""

    def __init__(
        self,
        update: Callable[[Sequence[T]], Any],
        publish: Callable[[Sequence[T]], Any],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._update, self._publish, self._most_bytes = update, publish, most_bytes
        self._waiting: deque[tuple[Sequence[T], int]] = deque()
        self._running: deque[Future[Sequence[T]]] = deque()

    def __enter__(self) -> Self:
        # OpenMP keeps the number of threads for each thread: the new one gets that of this one
        self._thread = ThreadPoolExecutor(
            1, "shardwise-update", torch.set_num_threads, (torch.get_num_threads(),)
        )
        return self

    def run(self, items: Sequence[T], size_bytes: int) -> None:
        """Update `items` after those before, maybe together, and publish what is updated by now."""
        self._waiting.append((items, size_bytes))
        self._running.append(self._thread.submit(self._take))
        while self._running and self._running[0].done():
            self._end()

    def _take(self) -> Sequence[T]:
        """Update what waits; nothing if an earlier call has taken it along."""
        taken, total_bytes = list[T](), 0
        while self._waiting and (
            not taken or total_bytes + self._waiting[0][1] <= self._most_bytes
        ):
            items, size_bytes = self._waiting.popleft()
            taken += items
            total_bytes += size_bytes
        if taken:
            self._update(taken)
        return taken

    def _end(self) -> None:
        taken = self._running.popleft().result()
        if taken:
            self._publish(taken)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            while self._running and error is None:
                self._end()
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._running.clear()
            self._waiting.clear()


class InPlace(Generic[T]):
    """The same for updates that the main thread makes itself, where states are on the device."""

    def __init__(
        self, update: Callable[[Sequence[T]], Any], publish: Callable[[Sequence[T]], Any]
    ) -> None:
        self._update, self._publish = update, publish

    def __enter__(self) -> Self:
        return self

    def run(self, items: Sequence[T], size_bytes: int) -> None:
        """Update and publish `items`."""
        self._update(items)
        self._publish(items)

    def __exit__(self, *_: object) -> None:
        return
