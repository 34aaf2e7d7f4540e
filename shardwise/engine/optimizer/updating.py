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

fp32, fp64    the class steps on this rank's blocks of the flat parameters (flat_parameter.py)
bf16, fp16    it steps on fp32 masters of the blocks, one unit at a time:
              master.grad = gradient in fp32;  step;  block = master in 16 bits
offload       masters (fp32, or the dtype of the weight), their gradients and their states are in
              host memory, where the class steps on them.  Then `publish` copies the updated
              masters to the device, in the dtype of the weight.  Parameters that rest in host
              memory too are updated there, as above.

All messages and copies between tiers begin on the main thread, in one order. (ZeRO-Offload, arXiv
2101.06840, sections 4.2 and 5.2.)
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.comm.move import begin_sum
from shardwise.comm.tiers.disk import Disk, Inline
from shardwise.comm.tiers.tiers import Tiers, begin_copy
from shardwise.comm.world import Axis
from shardwise.core.errors import NonFiniteError
from shardwise.core.reduce_order import EARLY_BYTES
from shardwise.core.tools.tree import leaves
from shardwise.engine.checks.guard import Guard
from shardwise.engine.optimizer.norm import LossScale
from shardwise.engine.optimizer.optimizer import Factor, Gradient, ShardedOptimizer
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.optimizer.optimizer_state import device_of
from shardwise.engine.precision import HALF
from shardwise.engine.step_end import PendingResult, StepNumbers
from shardwise.techniques.data.consensus import used_in
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.data.units import Unit
from shardwise.techniques.offload.disk_optimizer import DiskOptimizer

#: The bytes of one call on a thread of the host, if all gradients are there.
MOST_BYTES: Final = 2**26
#: The delay of a late update after `finish`; and the longest time that it waits for `finish`.
LATE_S: Final = 0.02
MOST_S: Final = 10.0


class MemoryOptimizer(ShardedOptimizer):
    """Masters and states of each flat group are on the tier of its row."""

    def _master(self, flat: Flat) -> Tensor | None:
        """A copy of the shard on the tier of its optimizer state, with 32 bits or more."""
        half, rests = flat.dtype in HALF, flat.shard
        if not (half or flat.moves.publish):
            return None
        if not flat.moves.offload:
            return rests.float()
        if not flat.moves.fetch:
            rests = begin_copy(rests, self.tiers, "device", "host").wait()
        return self.tiers.empty(rests.numel(), torch.float32).copy_(rests) if half else rests

    @torch.no_grad()
    def room(
        self, flat: Flat, index: int, key: str, size: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """New memory for a state tensor of a parameter of `flat`, on the state's tier."""
        group = self.param_groups[self.runs[flat].groups[index]]
        place = device_of(key, self.block(flat), group)
        made = torch.zeros(tuple(size), dtype=dtype, device=place)
        return self.tiers.own(made) if flat.moves.offload else made

    @torch.no_grad()
    def loaded(self) -> None:
        """After masters were written from outside: copy them to the weights."""
        self.follow_states()
        for flat in self.flats:
            self._end_step(flat)
        self.publish([*self.masters])

    @torch.no_grad()
    def publish(self, flats: Sequence[Flat]) -> None:
        """Copy the masters that are in host memory to weights on the device."""
        for flat in flats:
            if tier := flat.moves.publish:
                source = self.masters[flat]
                if flat.dtype in HALF:
                    source = self.tiers.empty(source.numel(), flat.dtype).copy_(source)
                begin_copy(source, self.tiers, "host", tier, flat.shard).wait()

    def _update(
        self, gradients: Mapping[Flat, Gradient], factor: Factor, own: list[dict[str, Any]]
    ) -> None:
        """Update flat groups in one call; 16-bit ones one by one, for their fp32 gradients."""
        half = [flat for flat in gradients if flat.dtype in HALF]
        wide = [flat for flat in gradients if flat not in half]
        parts = [[*gradients]] if self.together else [wide, *([flat] for flat in half)]
        for part in filter(None, parts):
            with self._stepping({flat: gradients[flat] for flat in part}, own, factor):
                self.torch.step()
            for flat in part:
                self._end_step(flat)

    def _end_step(self, flat: Flat) -> None:
        for run in self.runs[flat].every if flat.moves.offload else ():
            for value in leaves(self.torch.state.get(run.param), Tensor):
                self.tiers.own(value)  # a state is where its master is
        if flat in self.masters and not flat.moves.publish:
            self.tiers.settle(flat.shard)
            flat.shard.copy_(self.masters[flat])


def optimizer_of(
    spec: OptimizerSpec, data: Data, tiers: Tiers, disk: Disk | None
) -> ShardedOptimizer:
    """The optimizer of the trained flat groups, with states on a disk if there is one."""
    order = [flat for unit in data.units.order for flat in unit.trained]
    if disk is not None:
        return DiskOptimizer(spec, order, tiers, data.units, disk)
    return MemoryOptimizer(spec, order, tiers, data.units)


@dataclass(eq=False)
class Updates:
    """Updates the shards of one rank.

    norms        flat groups with the axes over which their squares of gradients are summed, before
                 `over_stages`
    clip         the bound on the norm of all gradients
    delays       whether the update of this step is made beside the next one
    by_schedule  the schedule updates each stage during the step (pipeline/weight_stashing.py)
    early_bytes  units of at least this size together are updated in one call; None: EARLY_BYTES;
                 if all gradients are there, MOST_BYTES on the host, else all
    late         make delayed updates only when `finish` waits for them, as on a slow host
    """

    optimizer: ShardedOptimizer
    data: Data
    guard: Guard
    scale: LossScale
    norms: Sequence[tuple[Sequence[Flat], Sequence[Axis]]]
    over_stages: Callable[[Tensor], Tensor]
    clip: float | None
    delays: Callable[[], bool]
    by_schedule: bool = False
    early_bytes: int | None = None
    late: bool = False
    asked: Event = field(default_factory=Event)  # `finish` waits

    @property
    def on_host(self) -> bool:
        offloads = any(flat.moves.offload for flat in self.optimizer.flats)
        return offloads and not self.optimizer.together

    @property
    def on_device(self) -> bool:
        """Whether the update waits for no number, on any rank or on none."""
        waits = self.by_schedule or self.scale.on or self.optimizer.together or self.on_host
        return not waits and self.optimizer.skips_on_device

    def update(
        self, arriving: Iterable[Unit], factor: Factor, norm: Tensor | float | None = None
    ) -> None:
        """Update units as soon as their gradients are summed, while other sums are under way; with
        the norm of all gradients, all at once, scaled by it.

        Small units are updated together: the overhead of a call exceeds its work on few elements.
        """
        units: Iterable[Unit] = self.data.units.order
        least_bytes = self.early_bytes or (MOST_BYTES if self.on_host else math.inf)
        later = self.on_host and self.delays()
        if norm is not None:
            factor = factor._replace(value=self.shrink(norm) * factor.value)
        elif later:
            deque(arriving, maxlen=0)
        else:
            units, least_bytes = arriving, self.early_bytes or EARLY_BYTES
        parts = self._parts(units, math.inf if self.optimizer.together else least_bytes)
        if not self.by_schedule:
            with self.optimizer.step_hooks():
                self._make(parts, factor, later=later)
        self.scale.update(overflow=False)

    def _make(self, parts: Iterable[Sequence[Flat]], factor: Factor, *, later: bool) -> None:
        """Update parts as they arrive.  Publish them when another one arrives, or at the end; or
        `later`, in `finish`.
        """
        self.finish()
        self.asked, thread = Event(), self._thread(late=later and self.late)
        try:
            for part in [*parts] if later else parts:
                update = self.optimizer.begin(part, factor, later=later)
                self.optimizer.running.append((thread.submit(update), part))
                while not later and self.optimizer.running and self.optimizer.running[0][0].done():
                    self._end_first()
            if not later:
                self.finish()
        finally:
            thread.shutdown(wait=not later, cancel_futures=not later)
        if not later:
            self.optimizer.clear(self.optimizer.flats)

    def _end_first(self) -> None:
        update, part = self.optimizer.running.popleft()
        update.result()
        self.optimizer.publish(part)

    def finish(self) -> None:
        """Make visible what is updated beside the step, or raise the error of an update."""
        self.asked.set()
        try:
            while self.optimizer.running:
                self._end_first()
        finally:
            self.optimizer.running.clear()

    def _thread(self, *, late: bool) -> Executor:
        """This thread; for updates on the host, one of its own until the last update of the step,
        with as many threads of OpenMP.
        """
        if not self.on_host or self.optimizer.tiers.device.type == "meta":
            return Inline()
        threads = torch.get_num_threads()
        return ThreadPoolExecutor(1, "shardwise-update", self._begin_thread, (threads, late))

    def _begin_thread(self, threads: int, late: bool) -> None:
        torch.set_num_threads(threads)
        if late:
            self.asked.wait(MOST_S)
            time.sleep(LATE_S)

    # --- numbers of a step ----------------------------------------------------------------------

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
        correction = numbers.correction.squeeze() if alone is None else 1 / alone
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
        part: list[Flat] = []
        for unit in units:
            unit.to_sharded()
            part += unit.trained
            if sum(flat.shard.nbytes for flat in part) >= least_bytes:
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
