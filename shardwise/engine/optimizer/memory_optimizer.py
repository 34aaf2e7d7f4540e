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

A step of many small tensors costs more in calls than in arithmetic.  A class that updates each
element alone updates neighbours of one group in a block as one tensor, a run:

    block             | p0 ..... | p1 .. | p2 ......... |     p1 is of another group: no decay
    runs              | run 0    | run 1 | run 2        |
    state of run 0    step, exp_avg                           state of p0: step, a view of exp_avg

That ends with the first update in which some have a gradient and others do not: from then on
(`part`) each parameter is updated alone, until states are loaded that can be joined.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.tiers.tiers import Tiers, begin_copy
from shardwise.core.tools.tree import leaves
from shardwise.engine.optimizer.optimizer import Factor, Member, ShardedOptimizer
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.optimizer.optimizer_state import device_of
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
        rests = flat.shard
        if not flat.moves.fetch:
            rests = begin_copy(rests, self.tiers, "device", "host").wait()
        half = flat.dtype in HALF
        return self.tiers.empty(rests.numel(), torch.float32).copy_(rests) if half else rests

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
        wide = [k for k in gradients if k not in half]
        parts = [[*gradients]] if self.together else [wide, *([k] for k in half)]
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
        self.owners.collect(weights, scale, update=update)
        yield
        self.owners.give(weights)

    @torch.no_grad()
    def switch(self, mode: str) -> None:
        self.units.to_sharded()
        with self._whole(range(len(self.flats)), 1.0, update=False):
            getattr(self.torch, mode)()
        self.loaded()
        self.units.begin_unshard()

    def _end_step(self, k: int) -> None:
        self.runs[k].detach()
        if k in self.masters and not self.flats[k].moves.publish:
            self.tiers.settle(self.flats[k].shard)
            self.flats[k].shard.copy_(self.masters[k])

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
            runs.loaded()
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


@dataclass(eq=False)
class FlatRun:
    """Parameters `indices`, all of one group: the elements [low, high) of a block."""

    group: int
    indices: Sequence[int]
    low: int
    high: int
    param: nn.Parameter
    state: dict[str, Any] = field(default_factory=dict[str, Any])  # torch's, between two steps


class Runs:
    """The runs of the k-th flat parameter of an optimizer; none if it needs whole tensors."""

    def __init__(self, optimizer: MemoryOptimizer, k: int) -> None:
        self.optimizer, self.k, self.flat = optimizer, k, optimizer.flats[k]
        self.targets, pieces = optimizer.targets[k], self.flat.pieces
        self.shapes = [self.flat.views.part(i, self.flat.shard).shape for i in range(len(pieces))]
        self.groups = [optimizer.group_of[id(target)] for target in self.targets]
        named = zip(self.flat.names, self.flat.shapes, strict=True)
        whole = any(optimizer.spec.is_whole(name, len(shape)) for name, shape in named)
        self.none = optimizer.masters.get(k, self.flat.shard).new_empty(0)
        self.runs: list[FlatRun] = []
        for group, run in groupby(range(0 if whole else len(pieces)), self.groups.__getitem__):
            indices = [*run]
            low, high = pieces[indices[0]][0], pieces[indices[-1]][1]
            self.runs.append(FlatRun(group, indices, low, high, nn.Parameter(self.none)))
        self.shown = 0
        self.joined = self._join()

    def states(self, indices: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """Torch's states of these parameters, or of all."""
        found = range(len(self.targets)) if indices is None else indices
        return [self.optimizer.state.get(self.targets[i], {}) for i in found]

    def attach(self, block: Tensor, values: Tensor | None, used: Sequence[bool]) -> list[Member]:
        """The tensors to update, with their gradients: parts of `block` and of `values`."""
        if self.joined and not any(used):
            return []
        if self.joined and self._shown() != self.shown:  # the program has reset or replaced states
            self.optimizer.replaced = True
            if not self._join():
                self.part()
        if not all(used):
            self.part()
        if self.joined:
            assert values is not None
            for run in self.runs:
                run.param.data = block[run.low : run.high]
                run.param.grad = values[run.low : run.high]
                if run.state:
                    self.optimizer.state[run.param] = dict(run.state)
            return [(run.group, run.param) for run in self.runs]
        for i, target in enumerate(self.targets):
            if (self.k, i) not in self.optimizer.owners.targets:  # else collected there
                graded = values if used[i] else None
                target.grad = None if graded is None else self.flat.views.part(i, graded)
        return list(zip(self.groups, self.targets, strict=True))

    def detach(self) -> None:
        """Drop the gradients after an update, and take the states that it may have made."""
        made = not self.joined
        for target in self.targets if made else ():
            target.grad = None
        for run in self.runs if self.joined else ():
            run.param.grad, run.param.data = None, self.none  # the block may be replaced
            state = self.optimizer.state.pop(run.param, run.state)
            if any(run.state.get(key) is not value for key, value in state.items()):
                self._show(run, state)
                made = True
        if made:
            self._own()

    def _own(self) -> None:
        """Count states of masters in host memory as host memory."""
        self.shown = self._shown() if self.joined else 0
        for value in leaves(self.states(), Tensor) if self.flat.moves.offload else ():
            self.optimizer.tiers.own(value)

    def _shown(self) -> int:
        """A hash that changes if a parameter's state is replaced by another object."""
        return hash(tuple(id(value) for state in self.states() for value in state.values()))

    def _show(self, run: FlatRun, state: dict[str, Any]) -> None:
        run.state = state
        for i in run.indices:
            low, high = (end - run.low for end in self.flat.pieces[i])
            self.optimizer.state[self.targets[i]] = {
                key: value[low:high].view(self.shapes[i])
                if isinstance(value, Tensor) and value.shape == (run.high - run.low,)
                else value
                for key, value in state.items()
            }

    def part(self) -> None:
        """Update each parameter alone from now on, with a step count of its own."""
        for run in self.runs if self.joined else ():
            known = set[int]()  # tensors that several parameters have: the step count
            for state in self.states(run.indices):
                shared = {k: v for k, v in state.items() if id(v) in known}
                known |= set(map(id, state.values()))
                state |= {k: v.clone() for k, v in shared.items() if isinstance(v, Tensor)}
            run.state = {}
        self.joined = False

    def loaded(self) -> None:
        """Join equal states into runs again after loading."""
        self.joined = self.joined or self._join()
        self._own()

    def held(self) -> list[dict[str, Any]]:
        return [run.state for run in self.runs] if self.joined else self.states()

    @torch.no_grad()
    def _join(self) -> bool:
        """Make the states of each run one; returns whether it can be done for all."""
        found = [self._joined(run, self.states(run.indices)) for run in self.runs]
        if None in found:
            return False
        for run, state in zip(self.runs, found, strict=True):
            run.state = {}
            if state:
                self._show(run, state)
        self.shown = self._shown()
        return bool(self.runs)

    def _joined(self, run: FlatRun, states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The state of a run from those of its parameters; None if they differ."""
        found, first = dict[str, Any](), states[0]
        shapes = [self.shapes[i] for i in run.indices]
        differ = any(state.keys() != first.keys() for state in states)
        if any(states) and (differ or not any(shapes)):
            return None
        for key, value in first.items():
            values = [state[key] for state in states]
            if isinstance(value, Tensor) and [each.shape for each in values] == shapes:
                found[key] = value.new_zeros(run.high - run.low)
                for i, each in zip(run.indices, values, strict=True):
                    low, high = (end - run.low for end in self.flat.pieces[i])
                    found[key][low:high] = each.reshape(-1)
            elif all(_equal(each, value) for each in values):
                found[key] = value
            else:
                return None
        return found


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other
