"""The update of a step: unit by unit as gradients arrive, all at once, or none.

early       without clipping: each unit as soon as its gradients are summed
by_norm     with clipping or fp16: all units, after the norm of all gradients is known
leave_out   gradients are not finite: dropped; weights and optimizer state stay (guard.py)

With offload, updates run on a thread of the host, while other units arrive and return, or while the
next step computes (`later`): then they are finished at its end, before its own update begins.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from shardwise.comm.ledger import Ledger
from shardwise.comm.move import begin_sum
from shardwise.comm.world import Axis
from shardwise.core.errors import NonFiniteError
from shardwise.engine.guard import Guard
from shardwise.engine.optimizer import ShardedOptimizer
from shardwise.engine.scale import LossScale
from shardwise.parallel.data.flat_parameter import Flat
from shardwise.parallel.data.hooks import Data
from shardwise.parallel.data.units import Unit
from shardwise.parallel.offload.delayed import NextStep
from shardwise.parallel.offload.host_thread import MOST_BYTES, HostThread, InPlace
from shardwise.parallel.offload.spans import Spans

#: Units of at least this size together are updated in one call.
EARLY_BYTES = 2**21


@dataclass(frozen=True)
class Updates:
    """Updates the shards of one rank.

    norms        flat groups with the axes over which their squares of gradients are summed, before
                 `over_stages`
    clip         the bound on the norm of all gradients
    by_schedule  whether the schedule updates each stage itself, so that nothing remains to do here
    early_bytes  units of at least this size together are updated in one call; None: EARLY_BYTES
    delays       whether the update of this step is made beside the next
    next_step    what runs such updates
    spans        the times of updates in memory, where they are recorded
    disk_spans   those of updates from a disk
    """

    optimizer: ShardedOptimizer
    data: Data
    flats: Sequence[Flat]
    guard: Guard
    scale: LossScale
    ledger: Ledger
    norms: Sequence[tuple[Sequence[Flat], Sequence[Axis]]]
    over_stages: Callable[[Tensor], Tensor]
    clip: float | None
    by_schedule: bool
    delays: Callable[[], bool]
    next_step: NextStep = field(default_factory=NextStep)
    early_bytes: int | None = None
    spans: Spans = field(default_factory=Spans)
    disk_spans: Spans = field(default_factory=Spans)

    def early(self, arriving: Iterable[Unit], correction: float) -> None:
        """Update units as soon as their gradients are summed, while other sums are under way.

        Small units are updated together: the overhead of a call exceeds its work on few elements.
        """
        if self.delays():
            for unit in arriving:
                unit.attach_grads()
            self._later(correction)
            return
        self.next_step.finish()
        ready, in_memory = list[Flat](), self.in_memory
        enough = self.early_bytes or EARLY_BYTES
        with self._thread(correction) as thread:
            for unit in arriving:
                unit.attach_grads()
                ready += [flat for flat in in_memory if flat in unit.trained]
                if _size_bytes(ready) >= enough:
                    thread.run(ready, _size_bytes(ready))
                    ready = []
            if ready:
                thread.run(ready, _size_bytes(ready))
            self._update_disk(correction)
        self.guard.passed()

    def squares(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of squares of all ranks' gradients [1], loss scale included: a double.

        With it the sum of `number` [1] over the tensor axis, in the same message.
        """
        with self.ledger.phase("backward"):
            self.data.sums.finish()
        with self.ledger.phase("check"):
            found: list[Tensor] = []
            for flats, axes in self.norms:
                squared = self.optimizer.squared_norm(flats).view(1).to(self.guard.world.device)
                for axis in axes:
                    beside = number if axis is self.guard.axis else number[:0]
                    total = begin_sum(torch.cat([squared, beside]), axis).wait()
                    squared, number = total[:1], total[1:] if len(beside) else number
                found.append(squared)
            return self.over_stages(torch.stack(found).sum(0)), number

    def by_norm(self, norm: float, correction: float) -> None:
        """Update all units at once, scaled by the norm of all gradients."""
        self.data.units.attach_grads()
        factor = self._factor(norm) * correction
        if self.delays():
            self._later(factor)
        else:
            with self._thread(factor) as thread:
                for flats in self.parts():
                    thread.run(flats, _size_bytes(flats))
                self._update_disk(factor)
            self.guard.passed()
        self.scale.update(overflow=False)

    def leave_out(self, step: int, summed: Tensor, norm: float | None) -> NonFiniteError | None:
        """End a step without its update. Returns the error to raise if it must not be skipped.

        `summed` is this rank's loss; `norm` is the norm of the gradients if that is the reason. All
        ranks call this, and all get an error or none.
        """
        with self.ledger.phase("backward"):
            self.data.sums.finish()
        if not self.by_schedule:
            self.data.units.attach_grads()
        self.next_step.finish()
        error = self.guard.record_skip(step, summed, self.flats, norm, self.scale.on)
        self.scale.update(overflow=True)
        self.optimizer.skip()
        for flat in self.flats:
            flat.grads.clear()
        return error

    @property
    def in_memory(self) -> Sequence[Flat]:
        """Flat groups with states in memory: all, or none."""
        return self.flats if self.optimizer.disk is None else ()

    def _update_disk(self, factor: float) -> None:
        """Update the states on a disk, all in one go.

        This thread streams them: the disk's threads are others.
        """
        if self.optimizer.disk is not None:
            update = partial(self.optimizer.step, self.flats, factor)
            self.disk_spans.timed(_name(self.flats), update)()
            self._publish(self.flats)

    @property
    def _on_host(self) -> bool:
        """Whether updates are made on states in host memory, by another thread."""
        return any(flat.moves.host_update for flat in self.in_memory)

    def _thread(self, factor: float) -> HostThread[Flat] | InPlace[Flat]:
        """What updates flat groups, with gradients times `factor`."""

        def update(flats: Sequence[Flat]) -> None:
            self.spans.timed(_name(flats), partial(self.optimizer.step, flats, factor))()

        if self._on_host:
            return HostThread(update, self._publish, self.early_bytes or MOST_BYTES)
        return InPlace(update, self._publish)

    def parts(self) -> list[Sequence[Flat]]:
        """What is updated at once when all gradients are there: all, or on the host 64 MiB."""
        if not self._on_host:
            return [self.in_memory] if self.in_memory else []
        found, part = list[Sequence[Flat]](), list[Flat]()
        for unit in self.data.units.order:
            part += unit.trained
            if _size_bytes(part) >= (self.early_bytes or MOST_BYTES):
                found.append(part)
                part = []
        return [*found, part] if part else found

    def _later(self, factor: float) -> None:
        """Finish the updates of the step before, and begin those of this one beside the next."""
        self.next_step.finish()
        updates = [
            (
                self.spans.timed(_name(flats), self.optimizer.later(flats, factor)),
                partial(self.optimizer.publish, flats),
            )
            for flats in self.parts()
        ]
        for flat in self.optimizer.flats:
            flat.grads.clear()
            flat.grads.swap()
        self.next_step.begin(updates)
        self.guard.passed()

    def _publish(self, flats: Sequence[Flat]) -> None:
        self.optimizer.publish(flats)
        for flat in flats:
            flat.grads.clear()

    def _factor(self, norm: float) -> float:
        """The factor of all gradients: removes the loss scale and clips (Pascanu et al., 2013)."""
        shrink = 1.0 if self.clip is None else min(1.0, self.clip / (norm + 1e-6))
        return shrink / self.scale.value


def _size_bytes(flats: Sequence[Flat]) -> int:
    return sum(flat.shard.nbytes for flat in flats)


def _name(flats: Sequence[Flat]) -> str:
    """What is updated, by the first and the last parameter."""
    names = [name for flat in flats for name in flat.names]
    return f"update {names[0]}" + f" .. {names[-1]}" * (len(names) > 1)
