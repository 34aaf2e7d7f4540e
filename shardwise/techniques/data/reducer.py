"""The order in which gradients are reduced: the same on every rank.

    autograd completes    5 4 . 2 3 . 1 0         in any order, which may differ between ranks
    sums begin            5 4 . . 3 2 1 0         from the last unit to the first
    sums are awaited        5 4 . . 3 2 1 0       in the order they began

At most `in_flight` sums hold buffers at once.  Further sums (over replicas in hybrid sharding; over
tensor ranks with partial gradients) begin when the first one is complete.

With updates in host memory (`offload`), at most `in_flight` units are in each of the two phases at
a time, also under rows that reduce once a step.  Then they are copied to the host and freed on the
device, while the backward pass continues.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from shardwise.techniques.data.flat_parameter import Flat
from shardwise.techniques.data.units import Unit


class Reductions:
    """The sums of one model's gradients."""

    def __init__(self, in_flight: int, *, repeated: bool, offload: bool) -> None:
        self.in_flight, self.repeated, self.offload = in_flight, repeated, offload
        self.sync = True  # whether the gradients of this backward pass are the last of the step
        self.next = 0  # how many units, counted from the last, have had their turn
        self.flying: deque[tuple[Unit, bool]] = deque()  # and whether the update waits for it
        self.landed: deque[Unit] = deque()
        self.left: deque[Unit] = deque()  # on their way to the tier of the update
        self.see: Callable[[Flat], None] = lambda _: None  # before the sum of a group begins
        self.leave: Callable[[Flat], None] = lambda _: None  # before it is copied to another tier

    def begin(self) -> None:
        """A backward pass begins."""
        self.next = 0

    def go_on(self, order: Sequence[Unit]) -> None:
        """Begin the sums of the complete units whose turn it is; `order` is that of the forward."""
        turns = order[::-1]
        while self.next < len(turns) and (
            turns[self.next].complete or not turns[self.next].trained
        ):
            self._reduce(turns[self.next])
            self.next += 1

    def end(self, order: Sequence[Unit]) -> None:
        """After autograd: begin the sums of units in which some parameter has no gradient."""
        for unit in order[::-1][self.next :]:
            self._reduce(unit)
        self.next = len(order)

    def _reduce(self, unit: Unit) -> None:
        each_backward = any(group.moves.each_backward for group in unit.trained)
        if not unit.trained or not (self.sync or each_backward):
            return
        while any(unit is flying for flying, _ in self.flying):
            self._land()  # its sum of the previous microbatch
        for group in unit.trained:
            self.see(group)
            group.grads.begin_reduce()
        self.flying.append((unit, self.sync))
        while (each_backward or self.offload) and len(self.flying) > self.in_flight:
            self._land()
        while self.offload and len(self.landed) > self.repeated * self.in_flight:
            self._leave()

    def _land(self) -> None:
        unit, sync = self.flying.popleft()
        for group in unit.trained:
            group.grads.end_reduce()
            if sync:
                group.grads.begin_further()
        if sync:
            self.landed.append(unit)

    def _leave(self) -> None:
        unit = self.landed.popleft()
        for group in unit.trained:
            group.grads.end_reduce()
            self.leave(group)
            group.grads.begin_offload()
        self.left.append(unit)

    def arrivals(self) -> Iterator[Unit]:
        """Yield each unit that the update waits for, once its gradients are summed."""
        while self.flying or self.landed or self.left:
            while self.flying and (self.repeated or not (self.landed or self.left)):
                self._land()  # all of them, if a second sum follows
            if self.landed:
                self._leave()
            if self.left:
                unit = self.left.popleft()
                for group in unit.trained:
                    group.grads.end_reduce()
                yield unit

    def finish(self) -> None:
        """Wait until every gradient is summed."""
        for _ in self.arrivals():
            pass
