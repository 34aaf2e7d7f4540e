"""A thread of the host on which updates run, in order, beside the thread that runs the step.

    main thread    unit 3 arrives    unit 2 arrives    publish 3    unit 1 arrives    publish 2  ...
    host thread                      update 3 ......   update 2 ..................    update 1 ...

`run(update, publish)` starts `update` on the host thread, after the updates before it. `publish`
runs on the main thread once the update is over: at a later `run`, or at the end of the block. All
messages and copies between tiers begin on the main thread, in one order.

(ZeRO-Offload, arXiv 2101.06840, section 4.2: updates overlap with the copies of other units.)
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import torch


class HostThread:
    """The thread lives as long as the `with` block. An error of an update is raised by `run`."""

    def __enter__(self) -> Self:
        # OpenMP keeps the number of threads for each thread: the new one gets that of this one
        self._thread = ThreadPoolExecutor(
            1, "shardwise-update", torch.set_num_threads, (torch.get_num_threads(),)
        )
        self._running: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        return self

    def run(self, update: Callable[[], Any], publish: Callable[[], Any]) -> None:
        """Start `update`, and call `publish` here when it is over."""
        self._running.append((self._thread.submit(update), publish))
        while self._running and self._running[0][0].done():
            self._publish()

    def _publish(self) -> None:
        future, publish = self._running.popleft()
        future.result()
        publish()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            while self._running and error is None:
                self._publish()
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._running.clear()


class InPlace:
    """The same for updates that the main thread makes itself, where states are on the device."""

    def __enter__(self) -> Self:
        return self

    def run(self, update: Callable[[], Any], publish: Callable[[], Any]) -> None:
        """Call both."""
        update()
        publish()

    def __exit__(self, *_: object) -> None:
        return
