"""The acts on units, and the order in which gradients are reduced: the same on every rank.

    autograd completes    5 4 . 2 3 . 1 0         in any order, which may differ between ranks
    sums begin            5 4 . . 3 2 1 0         from the last unit to the first
    sums are awaited        5 4 . . 3 2 1 0       in the order they began

At most `in_flight` sums hold buffers at once.  Further sums (over replicas in hybrid sharding; over
tensor ranks with partial gradients) begin when the first one is complete.  With updates in host
memory (`offload`), at most `in_flight` units are in each of the two phases at a time, also under
rows that reduce once a step; then they are copied to the host and freed on the device, while the
backward pass continues.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

from shardwise.core.zero import RowMoves

#: Units whose shards have at least this size together are updated in one call.
EARLY_BYTES: Final = 2**21

Gathering = Literal["gather", "wait", "use", "free", "free_early", "close", "placeholder"]
Reducing = Literal["reduce", "reduced", "replicate", "offload", "arrive"]


class Act(NamedTuple):
    """What to do with the unit of a number.  To gather or free it twice does nothing more.

    gather        begin to gather it
    wait          wait until it is gathered
    use           the same, for a use in forward, which all ranks make in the same order
    free          free it
    free_early    free it and set placeholders, as gradients may still arrive
    close         free it at the end of a pass, and end the reads of the program
    placeholder   give freed parameters their shapes without memory: gradients will arrive
    reduce        begin to reduce its gradients
    reduced       wait for the reduction, after which others of the step follow
    replicate     wait for the last reduction of the step, and begin the sums over further axes
    offload       wait for these, and begin to copy the gradients to the tier of the update
    arrive        wait for the copy: the gradients are there for the update
    """

    kind: Gathering | Reducing
    unit: int


@dataclass(eq=False)
class UnitState:
    """A unit: what its acts depend on, and its state during a pass.

    reshards        whether it is gathered only while it is used
    reads_backward  whether its backward pass reads its weights; looking up a table does not
    gradients       the number of its trained parameters
    frozen          whether it has frozen parameters, which may be read after the last gradient
    each_backward   whether its gradients are reduced after each backward pass, else once a step
    stays           whether it stays gathered between its calls, like a unit around others
    unwatched       whether gradients may arrive at its output unseen, or the output shares memory
                    with its weights: it stays gathered until the end of the pass
    reached         whether a gradient arrives at what its last call returned
    depth           the number of its modules that are running
    used            whether it has been used in a forward pass since it was freed
    missing         the number of gradients to come in this backward pass
    complete        whether there are none to come
    """

    reshards: bool
    reads_backward: bool = True
    gradients: int = 0
    frozen: bool = False
    each_backward: bool = False
    stays: bool = False
    unwatched: bool = False
    reached: bool = True
    depth: int = 0
    used: bool = False
    missing: int = 0
    complete: bool = False

    @classmethod
    def of(
        cls, groups: Sequence["Flattened"], *, reads_backward: bool, stays: bool = False
    ) -> "UnitState":
        """The state before a step."""
        trained = [group for group in groups if group.trained]
        return cls(
            any(group.moves.reshards for group in groups),
            reads_backward=reads_backward,
            gradients=sum(len(group.params) for group in trained),
            frozen=len(trained) < len(groups),
            each_backward=any(group.moves.each_backward for group in trained),
            stays=stays,
        )


class Flattened(Protocol):
    """What a flat parameter says of its unit."""

    @property
    def moves(self) -> RowMoves: ...

    @property
    def trained(self) -> bool: ...

    @property
    def params(self) -> Sequence[Any]: ...


class ReduceOrder:
    """Reductions under way; `further`: sums over other axes follow; `offload`: to the host."""

    def __init__(
        self, units: Sequence[UnitState], in_flight: int, *, further: bool, offload: bool
    ) -> None:
        self.units, self.in_flight = units, in_flight
        self.further, self.offload = further, offload
        self.sync = True
        self.next = 0  # how many units, counted from the last, have had their turn
        self.flying: deque[tuple[int, bool]] = deque()  # and whether the update waits for it
        self.landed: deque[int] = deque()
        self.left: deque[int] = deque()  # on their way to the tier of the update

    def begin(self, *, sync: bool) -> None:
        self.next, self.sync = 0, sync

    def go_on(self, order: Sequence[int]) -> list[Act]:
        """Reduce the complete units whose turn it is; `order` is that of the forward."""
        acts: list[Act] = []
        for unit in order[::-1][self.next :]:
            state = self.units[unit]
            if state.gradients and not state.complete:
                break
            acts += self._reduce(unit)
            self.next += 1
        return acts

    def end(self, order: Sequence[int]) -> list[Act]:
        acts = [act for unit in order[::-1][self.next :] for act in self._reduce(unit)]
        self.next = len(order)
        return acts

    def _reduce(self, unit: int) -> list[Act]:
        each_backward = self.units[unit].each_backward
        acts: list[Act] = []
        if not self.units[unit].gradients or not (self.sync or each_backward):
            return acts
        while any(unit == flying for flying, _ in self.flying):
            acts.append(self._land())  # its sum of the previous microbatch
        acts.append(Act("reduce", unit))
        self.flying.append((unit, self.sync))
        while (each_backward or self.offload) and len(self.flying) > self.in_flight:
            acts.append(self._land())
        while self.offload and len(self.landed) > self.further * self.in_flight:
            acts.append(self._leave())
        return acts

    def _land(self) -> Act:
        unit, sync = self.flying.popleft()
        if sync:
            self.landed.append(unit)
        return Act("replicate" if sync else "reduced", unit)

    def _leave(self) -> Act:
        unit = self.landed.popleft()
        self.left.append(unit)
        return Act("offload", unit)

    def arrivals(self) -> Iterator[Act]:
        """Each unit that the update waits for arrives, once its gradients are summed."""
        while self.flying or self.landed or self.left:
            while self.flying and (self.further or not (self.landed or self.left)):
                yield self._land()  # all of them, if a second sum follows
            if self.landed:
                yield self._leave()
            if self.left:
                yield Act("arrive", self.left.popleft())
