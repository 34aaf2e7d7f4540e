"""The update of a step: unit by unit as gradients arrive, all at once, or none.

update      without clipping each unit as soon as its gradients are summed; with clipping or fp16
            all units, after the norm of all gradients is known
leave_out   gradients are not finite: dropped; weights and optimizer state stay (guard.py)

On the thread that runs the step each part is updated when its gradients have arrived.  All are
updated together, when the last has arrived, if their states stream from a disk, or if the optimizer
needs whole tensors or counts its calls.

States in host memory are updated on a thread of the host; or all beside the next step (the delayed
parameter update of ZeRO-Offload).  Step 4 computes with the parameters that the update of step 2
made:

    main thread    forward 3, backward 3 | publish 2 | forward 4, backward 4 | publish 3 | ...
    host thread    update 2 ............             | update 3 ............             | ...

All messages and copies between tiers begin on the main thread, in one order. (ZeRO-Offload, arXiv
2101.06840, sections 4.2 and 5.2.)
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
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


class OnHost:
    """Updates on a thread of the host, which ends after the last one of the step.

    delayed   whether the update of this step is made beside the next one
    late      make these only when `finish` waits for them, as on a slow host
    pending   an update has begun that `finish` has not made visible
    """

    def __init__(self, optimizer: ShardedOptimizer, delayed: Callable[[], bool]) -> None:
        self.optimizer, self.delayed, self.late = optimizer, delayed, False
        self._asked = Event()  # `finish` waits
        self._running: list[tuple[Future[Any], Sequence[Flat]]] = []

    @property
    def pending(self) -> bool:
        return bool(self._running)

    def update(self, parts: Iterable[Sequence[Flat]], factor: Factor) -> None:
        """Update parts as they arrive, from their gradients times `factor`.

        Publish them when another part arrives, or at the end; or leave it to `finish`.
        """
        if self.delayed():
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
        self.optimizer.end_update(part)

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
        """Make visible what is updated beside the step, or raise the error of an update."""
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


def optimizer_and_thread(
    spec: OptimizerSpec,
    data: Data,
    tiers: Tiers,
    disk: Disk | None,
    offload: Offload | None,
    steps: Callable[[], int],
) -> tuple[ShardedOptimizer, OnHost | None]:
    """The optimizer of the trained flat groups, and the thread of its updates if they run on one.
    `steps()` counts steps.
    """
    order = [flat for unit in data.units.order for flat in unit.trained]
    if disk is not None:
        return DiskOptimizer(spec, order, tiers, disk), None
    optimizer = MemoryOptimizer(spec, order, tiers, data.units)
    if spec.together or not any(flat.moves.offload for flat in order):
        return optimizer, None
    return optimizer, OnHost(optimizer, lambda: offload is not None and offload.delays(steps()))


@dataclass(frozen=True)
class Updates:
    """Updates the shards of one rank.

    norms        flat groups with the axes over which their squares of gradients are summed, before
                 `over_stages`
    clip         the bound on the norm of all gradients
    host         where states in host memory are updated
    by_schedule  the schedule updates each stage during the step (pipeline/weight_stashing.py)
    early_bytes  units of at least this size together are updated in one call; None: EARLY_BYTES;
                 if all gradients are there, MOST_BYTES on the host, else all
    """

    optimizer: ShardedOptimizer
    host: OnHost | None
    data: Data
    guard: Guard
    scale: LossScale
    norms: Sequence[tuple[Sequence[Flat], Sequence[Axis]]]
    over_stages: Callable[[Tensor], Tensor]
    clip: float | None
    by_schedule: bool = False
    early_bytes: int | None = None

    @property
    def on_device(self) -> bool:
        """Whether the update waits for no number, on any rank or on none."""
        early = not (self.host or self.by_schedule or self.scale.on or self.optimizer.together)
        return early and self.optimizer.skips_on_device

    @property
    def pending(self) -> bool:
        """Whether an update runs beside the step."""
        return self.host is not None and self.host.pending

    def finish(self) -> None:
        """Make visible what is updated beside the step."""
        if self.host is not None:
            self.host.finish()

    def update(
        self, arriving: Iterable[Unit], factor: Factor, norm: Tensor | float | None = None
    ) -> None:
        """Update units as soon as their gradients are summed, while other sums are under way; with
        the norm of all gradients, all at once, scaled by it.

        Small units are updated together: the overhead of a call exceeds its work on few elements.
        """
        units: Iterable[Unit] = self.data.units.order
        least_bytes = self.early_bytes or (math.inf if self.host is None else MOST_BYTES)
        if norm is not None:
            factor = factor._replace(value=self.shrink(norm) * factor.value)
        elif self.host is not None and self.host.delayed():
            deque(arriving, maxlen=0)
        else:
            units, least_bytes = arriving, self.early_bytes or EARLY_BYTES
        parts = self._parts(units, math.inf if self.optimizer.together else least_bytes)
        if not self.by_schedule:
            with self.optimizer.step_hooks():
                self._make(parts, factor)
        self.optimizer.note()
        self.scale.update(overflow=False)

    def _make(self, parts: Iterable[Sequence[Flat]], factor: Factor) -> None:
        if self.host is not None:
            self.host.update(parts, factor)
            return
        for part in parts:
            self.optimizer.update(part, factor)
            self.optimizer.end_update(part)

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
        correction: Any = 1 / (alone or 1)
        if alone is None:  # without dims: factors change no dtype
            divisor = numbers.tokens.clamp(min=1) * numbers.parts
            correction = (numbers.over / divisor).squeeze()
        norm = numbers.squares.squeeze().sqrt() * correction if unread.by_norm else None
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
        if not self.by_schedule:
            self.data.units.to_sharded()
        self.finish()
        find = partial(self.guard.error, step, summed, self.optimizer.flats, norm)
        error = self.guard.record_skip(step, find, expected=self.scale.on)
        self.scale.update(overflow=True)
        self.optimizer.skip()
        self.optimizer.clear(self.optimizer.flats)
        return error
