"""Runs: neighbouring parameters in a block that an optimizer updates as one tensor.

    block             | p0 ..... | p1 .. | p2 ......... |     p1 is of another group: no decay
    runs              | run 0    | run 1 | run 2        |
    state of run 0    step, exp_avg                           state of p0: step, a view of exp_avg

A class that updates each element alone does to a run what it does to its parameters, if they have
the same step count.  That ends with the first update in which some have a gradient and others do
not: from then on (`part`) each parameter is updated alone, until states are loaded that can be
joined.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from shardwise.engine.optimizer.optimizer import Member, ShardedOptimizer


@dataclass(eq=False)
class FlatRun:
    """Parameters `indices`, all of one group: the elements [low, high) of a block."""

    group: int
    indices: Sequence[int]
    low: int
    high: int
    param: nn.Parameter
    resting: Tensor
    state: dict[str, Any] = field(default_factory=dict[str, Any])  # torch's, between two steps


class Runs:
    """The runs of the k-th flat parameter of an optimizer; none if it needs whole tensors."""

    def __init__(self, optimizer: "ShardedOptimizer", k: int) -> None:
        self.optimizer, self.k, self.flat = optimizer, k, optimizer.flats[k]
        self.targets, self.pieces = optimizer.targets[k], self.flat.pieces
        self.shapes = [
            self.flat.views.part(i, self.flat.shard).shape for i in range(len(self.targets))
        ]
        self.groups = [optimizer.group_of[id(target)] for target in self.targets]
        named = zip(self.flat.names, self.flat.shapes, strict=True)
        whole = any(optimizer.spec.is_whole(name, len(shape)) for name, shape in named)
        self.runs = [] if whole else [*self._runs()]
        self.shown = 0
        self.joined = self._join()

    def _runs(self) -> Iterator[FlatRun]:
        block = self.optimizer.masters.get(self.k, self.flat.shard)
        for group, run in groupby(range(len(self.targets)), self.groups.__getitem__):
            indices = [*run]
            low, high = self.pieces[indices[0]][0], self.pieces[indices[-1]][1]
            none = block.new_empty(0)
            yield FlatRun(group, indices, low, high, nn.Parameter(none), none)

    def attach(self, block: Tensor, values: Tensor | None, used: Sequence[bool]) -> "list[Member]":
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

    def detach(self) -> list[Tensor]:
        """Drop the gradients after an update; returns the states that it may have created."""
        if not self.joined:
            for target in self.targets:
                target.grad = None
            return self._tensors()
        made: list[Tensor] = []
        for run in self.runs:
            run.param.grad, run.param.data = None, run.resting  # the block may be replaced
            state = self.optimizer.state.pop(run.param, run.state)
            if any(run.state.get(key) is not value for key, value in state.items()):
                self._show(run, state)
                made += [value for value in state.values() if isinstance(value, Tensor)]
        self.shown = self._shown() if made else self.shown
        return made

    def _shown(self) -> int:
        """A hash that changes if a parameter's state is replaced by another object."""
        states = filter(None, map(self.optimizer.state.get, self.targets))
        return hash(tuple(map(id, chain.from_iterable(state.values() for state in states))))

    def _show(self, run: FlatRun, state: dict[str, Any]) -> None:
        run.state = state
        for i in run.indices:
            low, high = (end - run.low for end in self.pieces[i])
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
            for state in (self.optimizer.state.get(self.targets[i], {}) for i in run.indices):
                shared = {k: v for k, v in state.items() if id(v) in known}
                known |= set(map(id, state.values()))
                state |= {k: v.clone() for k, v in shared.items() if isinstance(v, Tensor)}
            run.state = {}
        self.joined = False

    def loaded(self) -> list[Tensor]:
        """Join equal states into runs again after loading. Returns the state tensors."""
        self.joined = self.joined or self._join()
        return self._tensors()

    def _tensors(self) -> list[Tensor]:
        states = [self.optimizer.state.get(target, {}) for target in self.targets]
        return [v for state in states for v in [*state.values()] if isinstance(v, Tensor)]

    def held(self) -> list[Mapping[str, Any]]:
        if self.joined:
            return [run.state for run in self.runs]
        return [self.optimizer.state.get(target, {}) for target in self.targets]

    @torch.no_grad()
    def _join(self) -> bool:
        """Make the states of each run one; returns whether it can be done for all."""
        found = list[dict[str, Any]]()
        for run in self.runs:
            states = [self.optimizer.state.get(self.targets[i], {}) for i in run.indices]
            joined = self._joined(run, states) if any(states) else {}
            if joined is None:
                return False
            found.append(joined)
        for run, state in zip(self.runs, found, strict=True):
            run.state = {}
            if state:
                self._show(run, state)
        self.shown = self._shown()
        return bool(self.runs)

    def _joined(self, run: FlatRun, states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The state of a run from those of its parameters; None if they differ."""
        found: dict[str, Any] = {}
        shapes = [self.shapes[i] for i in run.indices]
        if any(state.keys() != states[0].keys() for state in states) or not any(shapes):
            return None
        for key, first in states[0].items():
            values = [state[key] for state in states]
            if not isinstance(first, Tensor):
                same, found[key] = all(value == first for value in values), first
            elif [value.shape for value in values] == shapes:
                same, found[key] = True, first.new_zeros(run.high - run.low)
                for i, value in zip(run.indices, values, strict=True):
                    low, high = (end - run.low for end in self.pieces[i])
                    found[key][low:high] = value.reshape(-1)
            else:
                same, found[key] = all(torch.equal(value, first) for value in values), first
            if not same:
                return None
        return found
