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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from threading import Event
from typing import Any, Final

import torch

from shardwise.engine.optimizer.optimizer import Factor, ShardedOptimizer
from shardwise.techniques.data.flat.flat_parameter import Flat

#: The bytes of one call: with fewer, calls of torch's optimizer cost a tenth of the update.
MOST_BYTES: Final = 2**26
#: The delay of a late update after `finish`; and the longest time that it waits for `finish`.
LATE_S: Final = 0.02
MOST_S: Final = 10.0


class InPlace:
    """Updates the flat groups of an optimizer once a step, unless the step is skipped.

    late         make updates beside a step only when `finish` waits for them, as on a slow host
    by_schedule  the schedule updates each stage during the step (pipeline/weight_stashing.py)
    pending      an update has begun that `finish` has not made visible
    """

    late = by_schedule = pending = False

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer

    def update(self, parts: Iterable[Sequence[Flat]], factor: Factor, most_bytes: int) -> None:
        """Update parts as they arrive, from their gradients times `factor`. `most_bytes` bounds
        what another thread updates in one call, if that is several flat groups.
        """
        for part in parts:
            self.optimizer.update(part, factor)
            self._end(part)

    def _end(self, part: Sequence[Flat]) -> None:
        self.optimizer.publish(part)
        self.optimizer.clear(part)

    def finish(self) -> None:
        """Make visible what is updated beside the step, or raise the error of an update."""

    def owns(self) -> dict[str, int]:
        """Bytes of the device that it needs during a step, by category."""
        return {}


class Together(InPlace):
    """Updates all parts in one call, so that a disk is read ahead from the first to the last."""

    def update(self, parts: Iterable[Sequence[Flat]], factor: Factor, most_bytes: int) -> None:
        super().update([[flat for part in parts for flat in part]], factor, most_bytes)


class HostThread(InPlace):
    """Updates on a thread, which lives as long as a call of `update`."""

    def __init__(self, optimizer: ShardedOptimizer, *, inline: bool = False) -> None:
        super().__init__(optimizer)
        self.inline = inline

    def update(self, parts: Iterable[Sequence[Flat]], factor: Factor, most_bytes: int) -> None:
        """Publish updates when something else arrives, or at the end."""
        waiting, running = deque[list[Flat]](), deque[Future[list[Flat]]]()
        take = partial(self._take, waiting, factor, most_bytes)
        bounded = (pieces(part, most_bytes) for part in parts)
        thread = _thread(inline=self.inline)
        try:
            for piece in chain.from_iterable(bounded):
                waiting.append(piece)
                running.append(thread.submit(take))
                while running and running[0].done():
                    self._end(running.popleft().result())
            while running:
                self._end(running.popleft().result())
        finally:
            thread.shutdown(wait=True, cancel_futures=True)

    def _take(self, waiting: deque[list[Flat]], factor: Factor, most_bytes: int) -> list[Flat]:
        """Update what waits; nothing if an earlier call has taken it."""
        taken: list[Flat] = []
        while waiting and (not taken or size_bytes(taken + waiting[0]) <= most_bytes):
            taken += waiting.popleft()
        if taken:
            self.optimizer.update(taken, factor)
        return taken


class NextStep(HostThread):
    """The updates of one step, in order on a thread of the host, until `finish`.

    order     all flat groups, in the order in which the next step uses them
    delays    whether the update of this step is delayed; else it is made within the step
    """

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        order: Callable[[], Sequence[Flat]],
        delays: Callable[[], bool],
        *,
        inline: bool = False,
    ) -> None:
        super().__init__(optimizer, inline=inline)
        self.order, self.delays = order, delays
        self._asked = Event()  # `finish` waits
        self._running: list[tuple[Future[Any], list[Flat]]] = []

    @property
    def pending(self) -> bool:
        return bool(self._running)

    def update(self, parts: Iterable[Sequence[Flat]], factor: Factor, most_bytes: int) -> None:
        """When all parts have arrived, finish the last step's update and begin theirs."""
        if not self.delays():
            self.finish()
            super().update(parts, factor, most_bytes)
            return
        deque(parts, maxlen=0)
        self.finish()
        every = list(pieces(self.order(), most_bytes))
        updates = [self.optimizer.later(piece, factor) for piece in every]
        self._asked, thread = Event(), _thread(inline=self.inline)
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


def size_bytes(flats: Iterable[Flat]) -> int:
    return sum(flat.shard.nbytes for flat in flats)


def pieces(flats: Iterable[Flat], least_bytes: float) -> Iterator[list[Flat]]:
    """Flat groups in lists of at least this size; the last may be smaller."""
    piece: list[Flat] = []
    for flat in flats:
        piece.append(flat)
        if size_bytes(piece) >= least_bytes:
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
