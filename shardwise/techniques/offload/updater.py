"""The place of an update: on this thread, on a thread of the host, or beside the next step.

InPlace     each part when its gradients have arrived, on the thread that runs the step
Together    all parts at once, when the last has arrived: their states stream from a disk, or the
            optimizer needs whole tensors or counts its calls
HostThread  on a thread of the host, which updates in one call all that waits, up to a size:

    main thread    4 arrives  3 arrives  2 arrives  publish 4  1 arrives  publish 3, 2  ...
    host thread               update 4 ...........  update 3, 2 ..........  update 1 ...

NextStep    on such a thread, beside the next step (the delayed parameter update of ZeRO-Offload).
            Step 4 computes with the parameters that the update of step 2 made:

    main thread    forward 3, backward 3 | publish 2 | forward 4, backward 4 | publish 3 | ...
    host thread    update 2 ............             | update 3 ............             | ...

All messages and copies between tiers begin on the main thread, in one order. (ZeRO-Offload, arXiv
2101.06840, sections 4.2 and 5.2.)
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from threading import Event
from typing import Any, Final, Generic, Protocol, TypeVar

import torch

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

#: The bytes of one call: with fewer, calls of torch's optimizer cost a tenth of the update.
MOST_BYTES: Final = 2**26
#: The delay of a late update after `finish`; and the longest time that it waits for `finish`.
LATE_S: Final = 0.02
MOST_S: Final = 10.0


class FlatOptimizer(Protocol[T_contra]):
    """The optimizer of items, its flat groups (engine/optimizer/optimizer.py)."""

    def update(self, items: Sequence[T_contra], factor: Any, /) -> None: ...
    def later(self, items: Sequence[T_contra], factor: Any, /) -> Callable[[], None]: ...
    def publish(self, items: Sequence[T_contra], /) -> None: ...
    def clear(self, items: Sequence[T_contra], /) -> None: ...
    def size_bytes(self, items: Sequence[T_contra], /) -> int: ...


class Updater(ABC, Generic[T]):
    """Updates the items of an optimizer once a step, unless the step is skipped.

    late         make updates beside a step only when `finish` waits for them, as on a slow host
    by_schedule  the schedule updates each stage during the step (pipeline/weight_stashing.py)
    """

    late = by_schedule = False

    @property
    def pending(self) -> bool:
        """Whether an update has begun that `finish` has not made visible."""
        return False

    @abstractmethod
    def update(self, parts: Iterable[Sequence[T]], factor: Any, most_bytes: int) -> None:
        """Update parts as they arrive, from their gradients times `factor`. `most_bytes` bounds
        what another thread updates in one call, if that is several items.
        """

    def finish(self) -> None:
        """Make visible what is updated beside the step, or raise the error of an update."""

    def owns(self) -> dict[str, int]:
        """Bytes of the device that it needs during a step, by category."""
        return {}


class InPlace(Updater[T]):
    """Updates each part when it has arrived."""

    def __init__(self, optimizer: FlatOptimizer[T]) -> None:
        self.optimizer = optimizer

    def update(self, parts: Iterable[Sequence[T]], factor: Any, most_bytes: int) -> None:
        for part in parts:
            self.optimizer.update(part, factor)
            self.optimizer.publish(part)
            self.optimizer.clear(part)


class Together(Updater[T]):
    """Updates all parts in one call, so that a disk is read ahead from the first to the last."""

    def __init__(self, optimizer: FlatOptimizer[T]) -> None:
        self.at_once = InPlace(optimizer)

    def update(self, parts: Iterable[Sequence[T]], factor: Any, most_bytes: int) -> None:
        self.at_once.update([[item for part in parts for item in part]], factor, most_bytes)


class HostThread(Updater[T]):
    """Updates on a thread, which lives as long as a call of `update`."""

    def __init__(self, optimizer: FlatOptimizer[T], *, inline: bool = False) -> None:
        self.optimizer, self.inline = optimizer, inline

    def update(self, parts: Iterable[Sequence[T]], factor: Any, most_bytes: int) -> None:
        """Publish updates when something else arrives, or at the end."""
        waiting, running = deque[list[T]](), deque[Future[list[T]]]()
        take = partial(self._take, waiting, factor, most_bytes)
        bounded = (pieces(self.optimizer, part, most_bytes) for part in parts)
        thread = _thread(inline=self.inline)
        try:
            for piece in chain.from_iterable(bounded):
                waiting.append(piece)
                running.append(thread.submit(take))
                while running and running[0].done():
                    self._end(running.popleft())
            while running:
                self._end(running.popleft())
        finally:
            thread.shutdown(wait=True, cancel_futures=True)

    def _take(self, waiting: deque[list[T]], factor: Any, most_bytes: int) -> list[T]:
        """Update what waits; nothing if an earlier call has taken it."""
        taken: list[T] = []
        size_bytes = self.optimizer.size_bytes
        while waiting and (not taken or size_bytes(taken + waiting[0]) <= most_bytes):
            taken += waiting.popleft()
        if taken:
            self.optimizer.update(taken, factor)
        return taken

    def _end(self, update: Future[list[T]]) -> None:
        if taken := update.result():
            self.optimizer.publish(taken)
            self.optimizer.clear(taken)


class NextStep(Updater[T]):
    """The updates of one step, in order on a thread of the host, until `finish`.

    order     all items, in the order in which the next step uses them
    delays    whether the update of this step is delayed; else HostThread makes it
    """

    def __init__(
        self,
        optimizer: FlatOptimizer[T],
        order: Callable[[], Sequence[T]],
        delays: Callable[[], bool],
        *,
        inline: bool = False,
    ) -> None:
        self.optimizer, self.order, self.delays = optimizer, order, delays
        self.at_once = HostThread(optimizer, inline=inline)
        self._asked = Event()  # `finish` waits
        self._running: list[tuple[Future[Any], list[T]]] = []

    @property
    def pending(self) -> bool:
        return bool(self._running)

    def update(self, parts: Iterable[Sequence[T]], factor: Any, most_bytes: int) -> None:
        """When all parts have arrived, finish the last step's update and begin theirs."""
        if not self.delays():
            self.finish()
            self.at_once.update(parts, factor, most_bytes)
            return
        deque(parts, maxlen=0)
        self.finish()
        every = list(pieces(self.optimizer, self.order(), most_bytes))
        updates = [self.optimizer.later(piece, factor) for piece in every]
        self._asked, thread = Event(), _thread(inline=self.at_once.inline)
        begun = [thread.submit(self._run, update) for update in updates]
        self._running = list(zip(begun, every, strict=True))
        thread.shutdown(wait=False)  # it ends after the last update

    def _run(self, update: Callable[[], None]) -> None:
        if self.late:
            self._asked.wait(MOST_S)
            time.sleep(LATE_S)
        update()

    def finish(self) -> None:
        running, self._running = self._running, []
        self._asked.set()
        for update, piece in running:
            update.result()
            self.optimizer.publish(piece)


def pieces(optimizer: FlatOptimizer[T], items: Iterable[T], least_bytes: int) -> Iterator[list[T]]:
    """Items in lists of at least this size; the last may be smaller."""
    piece: list[T] = []
    for item in items:
        piece.append(item)
        if optimizer.size_bytes(piece) >= least_bytes:
            yield piece
            piece = []
    if piece:
        yield piece


class _Inline(Executor):
    """Runs what is submitted at once: modes of a dry run belong to its thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(fn(*args, **kwargs))
        return done


def _thread(*, inline: bool) -> Executor:
    """A thread for updates, with as many threads of OpenMP as this one."""
    if inline:
        return _Inline()
    threads = torch.get_num_threads()
    return ThreadPoolExecutor(1, "shardwise-update", torch.set_num_threads, (threads,))
