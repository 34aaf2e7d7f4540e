"""The update of a step: unit by unit as gradients arrive, all at once, or none.

early       without clipping: each unit as soon as its gradients are summed
by_norm     with clipping or fp16: all units, after the norm of all gradients is known
leave_out   gradients are not finite: dropped; weights and optimizer state stay (guard.py)

The updater decides where an update is made (techniques/offload/updater.py).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.move import begin_sum
from shardwise.comm.tiers.disk import Disk
from shardwise.comm.tiers.tiers import Tiers
from shardwise.comm.world import Axis
from shardwise.core.errors import NonFiniteError
from shardwise.core.reduce_order import EARLY_BYTES
from shardwise.engine.checks.guard import Guard
from shardwise.engine.optimizer.memory_optimizer import MemoryOptimizer
from shardwise.engine.optimizer.norm import LossScale
from shardwise.engine.optimizer.optimizer import Factor, OnDevice, ShardedOptimizer
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.step_end import PendingResult
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.data.units import Unit
from shardwise.techniques.offload.disk_optimizer import DiskOptimizer
from shardwise.techniques.offload.updater import (
    MOST_BYTES,
    HostThread,
    InPlace,
    NextStep,
    Together,
    size_bytes,
)
from shardwise.techniques.offload.word import Offload


def optimizer_and_updater(
    spec: OptimizerSpec,
    data: Data,
    tiers: Tiers,
    disk: Disk | None,
    offload: Offload | None,
    steps: Callable[[], int],
) -> tuple[ShardedOptimizer, InPlace]:
    """The optimizer of the trained flat groups, and its updater; `steps()` counts steps."""

    def order() -> list[Flat]:
        return [flat for unit in data.units.order for flat in unit.trained]

    if disk is not None:
        optimizer = DiskOptimizer(spec, order(), tiers, disk)
        return optimizer, Together(optimizer)
    optimizer = MemoryOptimizer(spec, order(), tiers, data.units)
    if spec.together:
        return optimizer, Together(optimizer)
    inline = tiers.device.type == "meta"
    if not any(flat.moves.offload for flat in optimizer.flats):
        return optimizer, InPlace(optimizer)
    if offload is None or offload.undelayed is None:
        return optimizer, HostThread(optimizer, inline=inline)
    return optimizer, NextStep(optimizer, order, lambda: offload.delays(steps()), inline=inline)


@dataclass(frozen=True)
class Updates:
    """Updates the shards of one rank.

    norms        flat groups with the axes over which their squares of gradients are summed, before
                 `over_stages`
    clip         the bound on the norm of all gradients
    early_bytes  units of at least this size together are updated in one call; None: EARLY_BYTES
    """

    optimizer: ShardedOptimizer
    updater: InPlace
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
        in_place = type(self.updater) is InPlace
        return in_place and not self.scale.on and self.optimizer.skips_on_device

    def early(self, arriving: Iterable[Unit], correction: Factor) -> None:
        """Update units as soon as their gradients are summed, while other sums are under way.

        Small units are updated together: the overhead of a call exceeds its work on few elements.
        """
        self._update(self._parts(arriving, self.early_bytes or EARLY_BYTES), correction)

    def without_wait(
        self, unread: PendingResult, numbers: Tensor, alone: float | None, arriving: Iterable[Unit]
    ) -> None:
        """Update by the numbers of a step that the device may not have made yet.

        `alone` is the number of microbatches if no other rank computes tokens.
        """
        consensus = self.data.consensus
        flags = consensus.flags()
        if not all(flags):  # of which other ranks may have a gradient
            flags = [n > 0 for n in unread.read().used[:-1]]
        consensus.set_used(flags)
        over, parts, loss, tokens = numbers[:4].unbind()  # without dims: factors change no dtype
        squares = numbers[-2]
        correction = over / (tokens.clamp(min=1) * parts) if alone is None else 1 / alone
        finite = torch.stack([loss, squares]).isfinite().all()
        factor = OnDevice(correction, finite.logical_not().float())
        if unread.by_norm:
            self.by_norm(squares.sqrt() * correction, factor)
        else:
            self.early(arriving, factor)

    def squares(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of squares of all ranks' gradients [1], loss scale included: a double.

        The sum of `number` [1] over the tensor axis travels in the same message.
        """
        with self.guard.world.ledger.phase("backward"):
            self.data.finish_sums()
        with self.guard.world.ledger.phase("check"):
            found: list[Tensor] = []
            for flats, axes in self.norms:
                squared = self.optimizer.squared_norm(flats).view(1).to(self.guard.world.device)
                for axis in axes:
                    beside = number if axis is self.guard.axis else number[:0]
                    total = begin_sum(torch.cat([squared, beside]), axis).wait()
                    squared, number = total[:1], total[1:] if len(beside) else number
                found.append(squared)
            return self.over_stages(torch.stack(found).sum(0)), number

    def by_norm(self, norm: Tensor | float, correction: Factor) -> None:
        """Update all units at once, scaled by the norm of all gradients."""
        parts = self._parts(self.data.units.order, math.inf)
        shrink = self.shrink(norm)
        if isinstance(correction, OnDevice):
            self._update(parts, OnDevice(shrink * correction.factor, correction.skips))
        else:
            self._update(parts, shrink * correction)
        self.scale.update(overflow=False)

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

    def _update(self, parts: Iterable[Sequence[Flat]], factor: Factor) -> None:
        hooks = nullcontext() if self.updater.by_schedule else self.optimizer.step_hooks()
        with hooks:
            self.updater.update(parts, factor, self.early_bytes or MOST_BYTES)
        self.optimizer.note()

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
