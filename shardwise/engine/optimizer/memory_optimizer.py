"""Masters and states of an optimizer in the memory of the device or of the host.

fp32, fp64    the class steps on this rank's blocks of the flat parameters (flat_parameter.py)
bf16, fp16    it steps on fp32 masters of the blocks, one unit at a time:
              master.grad = gradient in fp32;  step;  block = master in 16 bits
              A parameter costs 2 (weight) + 2 (gradient) + 12 (master, two moments) bytes, and 4
              more for one unit at a time.
offload       masters (fp32, or the dtype of the weight), their gradients and their states are in
              host memory, where the class steps on them.  Then `publish` copies the updated
              masters to the device, in the dtype of the weight.  Parameters that rest in host
              memory too are updated there, as above.

A step of many small tensors costs more in calls than in arithmetic: neighbours in a block that one
group of the optimizer updates element by element are one tensor (runs.py).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.tiers.tiers import Tiers, begin_copy
from shardwise.engine.optimizer.optimizer import Factor, Member, ShardedOptimizer
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.optimizer.optimizer_state import device_of
from shardwise.engine.optimizer.runs import Runs
from shardwise.engine.precision import HALF
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.data.units import Units

#: The gradient of a block, if there is any, and for each parameter whether it has one.
Gradient = tuple[Tensor | None, Sequence[bool]]


class MemoryOptimizer(ShardedOptimizer):
    """Masters and states of each flat group are on the tier of its row."""

    def __init__(
        self, spec: OptimizerSpec, flats: Sequence[Flat], tiers: Tiers, units: Units
    ) -> None:
        self.tiers, self.units, self.together = tiers, units, spec.together
        masters = {
            k: self._master(flat)
            for k, flat in enumerate(flats)
            if flat.dtype in HALF or flat.moves.publish
        }
        super().__init__(spec, flats, masters)
        self.runs = [Runs(self, k) for k in range(len(flats))]

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

    def begin_update(self, chosen: Sequence[int], factor: Factor) -> Callable[[], None]:
        gradients = {k: self._gradient(k, factor.value) for k in chosen}
        return partial(self._update, gradients, *factor)

    def _gradient(self, k: int, scale: Tensor | float) -> Gradient:
        """The gradient, and which parameters have one; with 32 bits or more it is scaled here."""
        grads = self.flats[k].grads
        scales = isinstance(scale, Tensor) or scale != 1.0
        if scales and grads.gshard is not None and self.flats[k].dtype not in HALF:
            grads.gshard.mul_(scale)
        return grads.gshard, list(grads.used)

    def _update(
        self, gradients: Mapping[int, Gradient], scale: Tensor | float, skips: Tensor | None
    ) -> None:
        """Update flat groups in one call; 16-bit ones one by one, for their fp32 gradients."""
        half = [k for k in gradients if self.flats[k].dtype in HALF]
        plain = [k for k in gradients if k not in self.masters]
        wide = [k for k in gradients if k in self.masters and k not in half]
        parts = [[*gradients]] if self.together else [plain, wide, *([k] for k in half)]
        for part in filter(None, parts):
            members = [pair for k in part for pair in self._attach(k, gradients[k], scale)]
            with self._whole(part, scale), self.only(members, skips):
                self.torch.step()
            for k in part:
                self._end_step(k)

    def _attach(self, k: int, gradient: Gradient, scale: Tensor | float) -> list[Member]:
        block, (values, used) = self.masters.get(k, self.flats[k].shard), gradient
        self.tiers.settle(block)
        if values is not None and self.flats[k].dtype in HALF:
            values = _in_32_bits(values, scale)
        return self.runs[k].attach(block, values, used)

    @contextmanager
    def _whole(
        self, part: Sequence[int], scale: Tensor | float, *, update: bool = True
    ) -> Iterator[None]:
        """Inside, the tensors that this rank owns are whole; at the end all ranks get theirs."""
        weights = {k: self.masters.get(k, self.flats[k].shard) for k in part}
        with torch.no_grad():
            self.owners.collect(weights, scale, update=update)
        yield
        with torch.no_grad():
            self.owners.give(weights)

    @torch.no_grad()
    def switch(self, mode: str) -> None:
        self.units.to_sharded()
        with self._whole(range(len(self.flats)), 1.0, update=False):
            getattr(self.torch, mode)()
        self.loaded()
        self.units.begin_unshard()

    def _end_step(self, k: int) -> None:
        self._own(k, self.runs[k].detach())
        if k in self.masters and not self.flats[k].moves.publish:
            self.tiers.settle(self.flats[k].shard)
            self.flats[k].shard.copy_(self.masters[k])

    def _own(self, k: int, states: Sequence[Tensor]) -> None:
        """Count new states of masters in host memory as host memory."""
        for value in states if self.flats[k].moves.offload else ():
            self.tiers.own(value)

    @torch.no_grad()
    def publish(self, flats: Sequence[Flat]) -> None:
        """Copy the masters that are in host memory to weights on the device."""
        for k in self._chosen(flats):
            flat = self.flats[k]
            if tier := flat.moves.publish:
                source = self.masters[k]
                if flat.dtype in HALF:
                    source = self.tiers.empty(source.numel(), flat.dtype).copy_(source)
                begin_copy(source, self.tiers, "host", tier, flat.shard).wait()

    def held(self) -> Iterable[Mapping[str, Any]]:
        if any(flat.moves.offload for flat in self.flats):
            return ()
        return chain.from_iterable(runs.held() for runs in self.runs)

    def loading(self) -> None:
        for runs in self.runs:
            runs.part()

    @torch.no_grad()
    def loaded(self) -> None:
        for k, runs in enumerate(self.runs):
            self._own(k, runs.loaded())
            self._end_step(k)
        self.publish([self.flats[k] for k in self.masters])

    @torch.no_grad()
    def room(self, k: int, index: int, key: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        target = self.targets[k][index]
        group = self.param_groups[self.group_of[id(target)]]
        made = torch.zeros(tuple(size), dtype=dtype, device=device_of(key, target, group))
        return self.tiers.own(made) if self.flats[k].moves.offload else made


def _in_32_bits(gradient: Tensor, scale: Tensor | float) -> Tensor:
    return gradient.float().mul_(scale)
