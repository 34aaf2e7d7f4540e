"""Runs: neighbours in a flat parameter's block that torch's optimizer updates as one tensor.

A step of many small tensors costs more in calls than in arithmetic.  A class that updates each
element alone updates neighbours of one group of options as one tensor:

    block             | p0 ..... | p1 .. | p2 ......... |     p1 is of another group: no decay
    runs              | run 0    | run 1 | run 2        |
    state of run 0    step, exp_avg                           state of p0: step, a view of exp_avg

A run is split into its parameters by the first update in which some have a gradient and others do
not, and where the program gives them states that differ.  A parameter without dims, and one that
its class needs whole, is a run by itself, in its own shape.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.optimizer.optimizer_state import State
from shardwise.flat.flat_parameter import Flat


class FlatRun:
    """Parameters `indices` of `of.flat`, all of one group of options: elements [low, high).

    param    what torch's optimizer steps on: it has data and a gradient in an update only; or
             a whole parameter that this rank may own, to which owners.py gives both
    shape    of a run that is one parameter in its own shape; None: a run has one dim
    """

    def __init__(self, of: "Runs", indices: Sequence[int]) -> None:
        first, self.flat, self.indices, self.none = indices[0], of.flat, indices, of.none
        self.low, self.high = self.flat.pieces[first][0], self.flat.pieces[indices[-1]][1]
        self.group, self.owned = of.groups[first], first in of.owned
        self.shape = shape_of(self.flat, first) if of.alone[first] else None
        self.param = of.owned[first] if self.owned else nn.Parameter(of.none)

    def part(self, values: Tensor, first: int = 0, last: int = sys.maxsize) -> Tensor:
        """What it has of `values`, elements [first, last) of a block."""
        found = values[max(self.low, first) - first : min(self.high, last) - first]
        return found if self.shape is None else found.view(self.shape)

    def attach(self, block: Tensor, values: Tensor | None, *span: int) -> None:
        """Set the data and the gradient; `span` are the elements of a block that these have."""
        if not self.owned:
            self.param.data = self.part(block, *span)
            self.param.grad = None if values is None else self.part(values, *span)

    def detach(self) -> None:
        self.param.grad = None
        if not self.owned:
            self.param.data = self.none  # the block may be replaced

    def is_mixed(self, used: Sequence[bool]) -> bool:
        return bool(used) and len({used[i] for i in self.indices}) > 1

    def state_of(self, state: State, index: int) -> State:
        """The state of one of its parameters: views, and copies of what the run has once."""
        (low, high), found = (end - self.low for end in self.flat.pieces[index]), dict(state)
        for key, value in state.items() if self.shape is None else ():
            if isinstance(value, Tensor):
                each = value.shape == (self.high - self.low,)
                shape = shape_of(self.flat, index)
                found[key] = value[low:high].view(shape) if each else value.clone()
        return found

    def joined(self, given: Mapping[Tensor, State], blocks: Mapping[str, Tensor]) -> State | None:
        """Its state from those of its parameters, maybe with parts of `blocks`; None if they
        differ.
        """
        states = [given.get(self.flat.params[i], {}) for i in self.indices]
        first = states[0]
        if self.shape is not None or any(state.keys() != first.keys() for state in states):
            return None if self.shape is None else first
        found, shapes = State(), [shape_of(self.flat, i) for i in self.indices]
        for key, value in first.items():
            values = [state[key] for state in states]
            if isinstance(value, Tensor) and [each.shape for each in values] == shapes:
                found[key] = self._whole(values, blocks.get(key))
            elif all(each is value or _equal(each, value) for each in values):
                found[key] = value
            else:
                return None
        return found

    def _whole(self, values: Sequence[Tensor], block: Tensor | None) -> Tensor:
        """The part of `block`, whose parts are the values; or new memory with the values."""
        if block is not None:
            return self.part(block)
        made = values[0].new_zeros(self.high - self.low)
        for i, value in zip(self.indices, values, strict=True):
            low, high = (end - self.low for end in self.flat.pieces[i])
            made[low:high] = value.reshape(-1)
        return made


class Runs:
    """The runs of a flat parameter, whose updates write to `block`; `owned` are targets by index.

    state    that of torch's optimizer
    blocks   by key, memory for the states of all its parameters, if it is there
    """

    def __init__(
        self, flat: Flat, spec: OptimizerSpec, block: Tensor, owned: Mapping[int, nn.Parameter]
    ) -> None:
        self.flat, self.none, self.owned = flat, block.new_empty(0), owned
        named = [*zip(flat.names, map(len, flat.shapes), strict=True)]
        self.groups = [spec.number(*each) for each in named]
        self.alone = [spec.is_whole(*each) or not each[1] for each in named]
        self.state: dict[Tensor, State] = {}
        self.blocks: Mapping[str, Tensor] = {}
        self.every = self._longest()

    def _longest(self) -> list[FlatRun]:
        kinds = [(g, i if self.alone[i] else None) for i, g in enumerate(self.groups)]
        every = groupby(range(len(kinds)), kinds.__getitem__)
        return [FlatRun(self, [*indices]) for _, indices in every]

    def states(self) -> dict[Tensor, State]:
        """The states of the parameters that have one."""
        return {
            self.flat.params[i]: run.state_of(state, i)
            for run in self.every
            if (state := self.state.get(run.param))
            for i in run.indices
        }

    def named_states(self) -> Iterator[tuple[str, Tensor]]:
        states = self.states()
        for name, p in zip(self.flat.names, self.flat.params, strict=True):
            for key, value in states.get(p, {}).items():
                if isinstance(value, Tensor):
                    yield f"{key} of {name}", value

    def arrange(self, given: Mapping[Tensor, State], used: Sequence[bool] = ()) -> None:
        """Let torch have these states, joined unless they differ or not all of a run are `used`."""
        for run in self.every:
            self.state.pop(run.param, None)
        left, self.every = self._longest(), []
        while left:
            run = left.pop(0)
            state = None if run.is_mixed(used) else run.joined(given, self.blocks)
            if state is None:
                left = [FlatRun(self, [i]) for i in run.indices] + left
                continue
            self.every.append(run)
            if state:
                self.state[run.param] = state

    def part(self, used: Sequence[bool]) -> None:
        """Split runs in which some parameters have a gradient and others do not."""
        if not all(used) and any(run.is_mixed(used) for run in self.every):
            self.arrange(self.states(), used)


def shape_of(flat: Flat, index: int) -> torch.Size:
    """The shape of this rank's part of a parameter, and of a state that has all its elements."""
    return flat.views.part(index, flat.shard).shape


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


class ShownStates:
    """The states by the model's parameters: from `show` on, as a program reads and writes them;
    `follow` then takes over what it wrote.
    """

    def __init__(self, runs: Mapping[Flat, Runs]) -> None:
        self.runs = runs
        self.shown = defaultdict[Tensor, State](dict)
        self.versions: dict[Tensor, int] = {}  # of the states, while they are shown

    def every(self) -> dict[Tensor, State]:
        """The states of the parameters that have one."""
        return {p: s for runs in self.runs.values() for p, s in runs.states().items()}

    def show(self) -> defaultdict[Tensor, State]:
        if not self.versions:
            self.shown |= self.every()
            self.versions = {p: version(state) for p, state in self.shown.items()}
        return self.shown

    def written(self) -> dict[Tensor, State]:
        """The states that the program, or a checkpoint, has written since they were shown."""
        none = version({})
        states = {p: self.shown.get(p, {}) for p in {**self.shown, **self.versions}}
        return {p: s for p, s in states.items() if version(s) != self.versions.get(p, none)}

    def follow(self) -> None:
        """Take over the states that were written."""
        written = self.written()
        for flat, runs in self.runs.items() if written else ():
            if not written.keys().isdisjoint(flat.params):
                runs.arrange(runs.states() | written)
        self.shown.clear()
        self.versions.clear()


def version(state: State) -> int:
    """A number that changes if a value is written to, added or replaced."""
    return hash(tuple((k, id(x), getattr(x, "_version", 0)) for k, x in state.items()))
