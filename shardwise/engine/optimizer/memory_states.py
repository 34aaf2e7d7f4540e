"""Masters and states of an optimizer in memory, of the device or of the host.

fp32, fp64    the class steps on the user's own parameters at rest (flat_parameter.py)
bf16, fp16    it steps on fp32 masters of the pieces, one unit at a time:
master.grad = p.grad in fp32;  step;  p = master in 16 bits
so that a parameter costs 2 (weight) + 2 (gradient) + 12 (master, two moments)
bytes, and 4 more for one unit at a time
offload       masters, in 32 bits or in those of the weight, their gradients and their states
are in host memory, where the class steps on them; then `publish` copies the
updated masters to the device, in the precision of the weight.  Where parameters
rest in host memory too, they are updated there, as above
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.comm.tiers.tiers import Tiers, begin_copy
from shardwise.engine.optimizer.optimizer import ShardedOptimizer, States
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.optimizer.optimizer_state import device_of
from shardwise.engine.precision import HALF
from shardwise.techniques.data.flat.flat_parameter import Flat


class MemoryStates(States):
    """The states of trained flat groups `flats`, each on the tier of its row."""

    def __init__(self, spec: OptimizerSpec, flats: Sequence[Flat], tiers: Tiers) -> None:
        self.flats, self.tiers = flats, tiers
        self.masters = {
            k: self._master(flat)
            for k, flat in enumerate(flats)
            if flat.dtype in HALF or flat.moves.publish
        }
        self.optimizer = ShardedOptimizer(spec, flats, self, self.masters)

    def _master(self, flat: Flat) -> Tensor:
        """A copy of the shard on the tier of its optimizer state, with 32 bits or more."""
        if not flat.moves.offload:
            return flat.shard.float()
        if flat.moves.fetch:
            return self.tiers.empty(flat.shard.numel(), torch.float32).copy_(flat.shard)
        copied = begin_copy(flat.shard, self.tiers, "device", "host").wait()
        if flat.dtype not in HALF:
            return copied
        return self.tiers.empty(copied.numel(), torch.float32).copy_(copied)

    def later(self, chosen: Sequence[int], factor: float) -> Callable[[], None]:
        return partial(self._update, {k: self._gradients(k, factor) for k in chosen}, factor)

    def _gradients(self, k: int, factor: float) -> list[Tensor | None]:
        """The gradient of each parameter for the update; in 32 bits and more it is multiplied."""
        flat = self.flats[k]
        if factor != 1.0 and flat.grads.gshard is not None and flat.dtype not in HALF:
            flat.grads.gshard.mul_(factor)
        return [flat.grads.piece(index) for index in range(len(flat.params))]

    def _update(self, gradients: Mapping[int, Sequence[Tensor | None]], factor: float) -> None:
        plain = [k for k in gradients if k not in self.masters]
        if plain:
            self._step(plain)
        self._step_masters({k: gradients[k] for k in gradients if k in self.masters}, factor)
        for k in gradients:
            self._own(k)

    def _step(self, chosen: Sequence[int]) -> None:
        self.optimizer.step_pieces((p, p) for k in chosen for p in self.optimizer.targets[k])

    def _step_masters(
        self, gradients: Mapping[int, Sequence[Tensor | None]], factor: float
    ) -> None:
        """Step on the masters of flat groups, in one call of torch's optimizer.

        In 16 bits each has its own call, which needs its gradients in 32.
        """
        wide = [k for k in gradients if self.flats[k].dtype not in HALF]
        parts = [wide, *([k] for k in gradients if k not in wide)]
        for part in filter(None, parts):
            for k in part:
                self.tiers.settle(self.masters[k])
                own = gradients[k] if k in wide else _in_32_bits(gradients[k], factor)
                for target, gradient in zip(self.optimizer.targets[k], own, strict=True):
                    target.grad = gradient
            self._step(part)
            for k in part:
                self._end_step(k)

    def _end_step(self, k: int) -> None:
        """Drop the gradients, and copy the masters to the weights that are on their tier."""
        for target in self.optimizer.targets[k]:
            target.grad = None
        if not self.flats[k].moves.publish:
            self.tiers.settle(self.flats[k].shard)
            self.flats[k].shard.copy_(self.masters[k])

    def _own(self, k: int) -> None:
        """Count torch's states of masters in host memory as host memory."""
        for target in self.optimizer.targets[k] if self.flats[k].moves.offload else ():
            for value in list(self.optimizer.state.get(target, {}).values()):
                if isinstance(value, Tensor):
                    self.tiers.own(value)

    @torch.no_grad()
    def publish(self, chosen: Sequence[int]) -> None:
        """Copy the masters that are in host memory to weights on the device."""
        for k in chosen:
            flat = self.flats[k]
            if tier := flat.moves.publish:
                source = self.masters[k]
                if flat.dtype in HALF:
                    source = self.tiers.empty(source.numel(), flat.dtype).copy_(source)
                begin_copy(source, self.tiers, "host", tier, flat.shard).wait()

    @torch.no_grad()
    def loaded(self) -> None:
        for k in range(len(self.flats)):
            self._own(k)
        for k in self.masters:
            self._end_step(k)
        self.publish(list(self.masters))

    @torch.no_grad()
    def room(self, k: int, index: int, key: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        target = self.optimizer.targets[k][index]
        group = self.optimizer.param_groups[self.optimizer.group_of[id(target)]]
        made = torch.zeros(tuple(size), dtype=dtype, device=device_of(key, target, group))
        return self.tiers.own(made) if self.flats[k].moves.offload else made


def _in_32_bits(gradients: Sequence[Tensor | None], factor: float) -> list[Tensor | None]:
    return [None if g is None else g.float().mul_(factor) for g in gradients]
