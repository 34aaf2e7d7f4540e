"""The update of a step: unit by unit as gradients arrive, all at once, or none.

update      without clipping each unit as soon as its gradients are summed; with clipping or fp16
            all units, after the norm of all gradients is known
leave_out   gradients are not finite: dropped; weights and optimizer state stay (guard.py)

An updater decides where: on this thread, on a thread of the host, or beside the next step.

InPlace     each part when its gradients have arrived, on the thread that runs the step; or all
            together, when the last has arrived: their states stream from a disk, or the optimizer
            needs whole tensors or counts its calls
OnHost      each part on a thread of the host; or all beside the next step (the delayed parameter
            update of ZeRO-Offload).  Step 4 computes with the parameters that the update of step 2
            made:

    main thread    forward 3, backward 3 | publish 2 | forward 4, backward 4 | publish 3 | ...
    host thread    update 2 ............             | update 3 ............             | ...

All messages and copies between tiers begin on the main thread, in one order. (ZeRO-Offload, arXiv
2101.06840, sections 4.2 and 5.2.)
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.comm.move import begin_sum
from shardwise.comm.tiers.disk import Disk, Inline
from shardwise.comm.tiers.tiers import Tiers
from shardwise.comm.world import Axis
from shardwise.core.errors import NonFiniteError
from shardwise.core.reduce_order import EARLY_BYTES
from shardwise.engine.checks.guard import Guard
from shardwise.engine.optimizer.memory_optimizer import MemoryOptimizer
from shardwise.engine.optimizer.norm import LossScale
from shardwise.engine.optimizer.optimizer import Factor, ShardedOptimizer
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.step_end import PendingResult, StepNumbers
from shardwise.techniques.data.consensus import used_in
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.data.units import Unit
from shardwise.techniques.offload.disk_optimizer import DiskOptimizer
from shardwise.techniques.offload.word import Offload

#: The bytes of one call on a thread of the host, if all gradients are there.
MOST_BYTES: Final = 2**26
#: The delay of a late update after `finish`; and the longest time that it waits for `finish`.
LATE_S: Final = 0.02
MOST_S: Final = 10.0


class Updater(ABC):
    """Updates the flat groups of an optimizer once a step, unless the step is skipped.

    most_bytes   of one call, if all gradients are there
    late         make updates beside a step only when `finish` waits for them, as on a slow host
    by_schedule  the schedule updates each stage during the step (pipeline/weight_stashing.py)
    pending      an update has begun that `finish` has not made visible
    """

    most_bytes = math.inf
    late = by_schedule = pending = False

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer

    @abstractmethod
    def update(self, parts: Iterable[Sequence[Flat]], factor: Factor) -> None:
        """Update parts as they arrive, from their gradients times `factor`."""

    def delays(self) -> bool:
        """Whether the update of this step is made beside the next one."""
        return False

    def _end(self, part: Sequence[Flat]) -> None:
        self.optimizer.publish(part)
        self.optimizer.clear(part)

    def finish(self) -> None:
        """Make visible what is updated beside the step, or raise the error of an update."""
        return

    def owns(self) -> dict[str, int]:
        """Bytes of the device that it needs during a step, by category."""
        return {}


class InPlace(Updater):
    """Each part at once."""

    def update(self, parts: Iterable[Sequence[Flat]], factor: Factor) -> None:
        for part in parts:
            self.optimizer.update(part, factor)
            self._end(part)


class OnHost(Updater):
    """On a thread that ends after the last update of the step."""

    most_bytes = MOST_BYTES

    def __init__(self, optimizer: ShardedOptimizer, delayed: Callable[[], bool]) -> None:
        super().__init__(optimizer)
        self.delayed = delayed
        self._asked = Event()  # `finish` waits
        self._running: list[tuple[Future[Any], Sequence[Flat]]] = []

    @property
    def pending(self) -> bool:
        return bool(self._running)

    def delays(self) -> bool:
        return self.delayed()

    def update(self, parts: Iterable[Sequence[Flat]], factor: Factor) -> None:
        """Publish updates when another part arrives, or at the end; or leave it to `finish`."""
        if self.delays():
            self._update_later([*parts], factor)
            return
        self.finish()
        thread, running = self._thread(), deque[tuple[Future[None], Sequence[Flat]]]()
        try:
            for part in parts:
                running.append((thread.submit(self.optimizer.update, part, factor), part))
                while running and running[0][0].done():
                    self._end_first(running)
            while running:
                self._end_first(running)
        finally:
            thread.shutdown(wait=True, cancel_futures=True)

    def _end_first(self, running: deque[tuple[Future[None], Sequence[Flat]]]) -> None:
        update, part = running.popleft()
        update.result()
        self._end(part)

    def _update_later(self, parts: Sequence[Sequence[Flat]], factor: Factor) -> None:
        """Finish the last step's update and begin this one."""
        self.finish()
        updates = [self.optimizer.later(part, factor) for part in parts]
        self._asked, thread = Event(), self._thread()
        begun = [thread.submit(self._run, update) for update in updates]
        self._running = list(zip(begun, parts, strict=True))
        thread.shutdown(wait=False)

    def _run(self, update: Callable[[], None]) -> None:
        if self.late:
            self._asked.wait(MOST_S)
            time.sleep(LATE_S)
        update()

    def finish(self) -> None:
        running, self._running = self._running, []
        self._asked.set()
        for update, part in running:
            update.result()
            self.optimizer.publish(part)

    def _thread(self) -> Executor:
        """A thread for updates, with as many threads of OpenMP as this one."""
        if self.optimizer.tiers.device.type == "meta":
            return Inline()
        threads = torch.get_num_threads()
        return ThreadPoolExecutor(1, "shardwise-update", torch.set_num_threads, (threads,))


def size_bytes(flats: Iterable[Flat]) -> int:
    return sum(flat.shard.nbytes for flat in flats)


# --- what a step updates --------------------------------------------------------------------------


def optimizer_and_updater(
    spec: OptimizerSpec,
    data: Data,
    tiers: Tiers,
    disk: Disk | None,
    offload: Offload | None,
    steps: Callable[[], int],
) -> tuple[ShardedOptimizer, Updater]:
    """The optimizer of the trained flat groups, and its updater; `steps()` counts steps."""
    order = [flat for unit in data.units.order for flat in unit.trained]
    if disk is not None:
        optimizer = DiskOptimizer(spec, order, tiers, disk)
        return optimizer, InPlace(optimizer)
    optimizer = MemoryOptimizer(spec, order, tiers, data.units)
    if spec.together or not any(flat.moves.offload for flat in order):
        return optimizer, InPlace(optimizer)
    return optimizer, OnHost(optimizer, lambda: offload is not None and offload.delays(steps()))


@dataclass(frozen=True)
class Updates:
    """Updates the shards of one rank.

    norms        flat groups with the axes over which their squares of gradients are summed, before
                 `over_stages`
    clip         the bound on the norm of all gradients
    early_bytes  units of at least this size together are updated in one call; None: EARLY_BYTES, or
                 what the updater takes at most
    """

    optimizer: ShardedOptimizer
    updater: Updater
    data: Data
    guard: Guard
    scale: LossScale
    norms: Sequence[tuple[Sequence[Flat], Sequence[Axis]]]
    over_stages: Callable[[Tensor], Tensor]
    clip: float | None
    early_bytes: int | None = None

    @property
    def on_device(self) -> bool:
        """Whether the update waits for no number, on any rank or on none."""
        early = isinstance(self.updater, InPlace) and not self.optimizer.together
        return early and not self.scale.on and self.optimizer.skips_on_device

    def update(
        self, arriving: Iterable[Unit], factor: Factor, norm: Tensor | float | None = None
    ) -> None:
        """Update units as soon as their gradients are summed, while other sums are under way; with
        the norm of all gradients, all at once, scaled by it.

        Small units are updated together: the overhead of a call exceeds its work on few elements.
        """
        units: Iterable[Unit] = self.data.units.order
        least_bytes = self.early_bytes or self.updater.most_bytes
        if norm is not None:
            factor = factor._replace(value=self.shrink(norm) * factor.value)
        elif self.updater.delays():
            deque(arriving, maxlen=0)
        else:
            units, least_bytes = arriving, self.early_bytes or EARLY_BYTES
        parts = self._parts(units, math.inf if self.optimizer.together else least_bytes)
        with nullcontext() if self.updater.by_schedule else self.optimizer.step_hooks():
            self.updater.update(parts, factor)
        self.optimizer.note()
        self.scale.update(overflow=False)

    def factor_without_wait(
        self, unread: PendingResult, numbers: StepNumbers, alone: float | None
    ) -> tuple[Factor, Tensor | None]:
        """For `update`, from the numbers of a step that the device may not have made yet.

        `alone` is the number of microbatches if no other rank computes tokens.
        """
        consensus = self.data.consensus
        flags = consensus.flags()
        if not all(flags):  # of which other ranks may have a gradient
            flags = used_in(unread.read().used)
        consensus.set_used(flags)
        finite = torch.cat([numbers.loss, numbers.squares]).isfinite().all()
        # without dims: factors change no dtype
        over, parts, _, tokens, _, squares, _ = (each.squeeze() for each in numbers)
        correction = over / (tokens.clamp(min=1) * parts) if alone is None else 1 / alone
        norm = squares.sqrt() * correction if unread.by_norm else None
        return Factor(correction, finite.logical_not().float()), norm

    def squares(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of squares of all ranks' gradients [1], loss scale included: a double.

        The sum of `number` [1] over the tensor axis travels in the same message.
        """
        with self.guard.world.ledger.phase("backward"):
            self.data.finish_sums()
        with self.guard.world.ledger.phase("check"):
            found, device = list[Tensor](), self.guard.world.device
            for flats, axes in self.norms:
                own = [each.to(device) for each in self.optimizer.squares(flats)]
                squared = torch.stack(own).sum().view(1) if own else number.new_zeros(1)
                for axis in axes:
                    beside = number if axis is self.guard.axis else number[:0]
                    total = begin_sum(torch.cat([squared, beside]), axis).wait()
                    squared, number = total[:1], total[1:] if len(beside) else number
                found.append(squared)
            return self.over_stages(torch.stack(found).sum(0)), number

    def shrink(self, norm: Any) -> Any:
        """The factor that bounds gradients of this norm (Pascanu et al., arXiv 1211.5063)."""
        if self.clip is None or norm is None:
            return 1.0
        ratio = self.clip / (norm + 1e-6)
        whole = isinstance(ratio, Tensor)
        return ratio.nan_to_num(1.0).clamp(max=1.0) if whole else min(1.0, ratio)

    def _parts(self, units: Iterable[Unit], least_bytes: float) -> Iterator[list[Flat]]:
        """Flat groups at rest, units of at least this size together."""
        part: list[Flat] = []
        for unit in units:
            unit.to_sharded()
            part += unit.trained
            if size_bytes(part) >= least_bytes:
                yield part
                part = []
        if part:
            yield part

    def leave_out(self, step: int, summed: Tensor, norm: float | None) -> NonFiniteError | None:
        """End a step without its update. Returns the error to raise if it must not be skipped.

        `summed` is this rank's loss; `norm` is the norm of the gradients if that is the reason.
        All ranks call this, and all get an error or none.
        """
        with self.guard.world.ledger.phase("backward"):
            self.data.finish_sums()
        if not self.updater.by_schedule:
            self.data.units.to_sharded()
        self.updater.finish()
        find = partial(self.guard.error, step, summed, self.optimizer.flats, norm)
        error = self.guard.record_skip(step, find, expected=self.scale.on)
        self.scale.update(overflow=True)
        self.optimizer.skip()
        self.optimizer.clear(self.optimizer.flats)
        return error
