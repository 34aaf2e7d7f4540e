"""When things happen to the units of a pipeline's stages: when the schedule says so.

    GATHER s      the units of stage s become whole, where the row keeps parameters sharded
    F B I W s     compute with them; gradients are collected as autograd leaves them
    FREE s        they are at rest again
    REDUCE s      their gradients begin to be summed (reducer.py); the update waits for the sums

Nothing is hooked but the gradients: hooks.py does the same for a model that no schedule drives.  A
parameter that several stages use is in one unit; on a rank that has all of these stages its sum
begins when the last of them is reduced.  Between ranks it is summed over those that hold it, after
all the others, in the order of the names: every rank takes the same.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwise.core.hook import no_copy
from shardwise.core.weak import weakly
from shardwise.parallel.data.consensus import Facts
from shardwise.parallel.data.flat_parameter import Flat
from shardwise.parallel.data.reducer import Reductions
from shardwise.parallel.data.units import Unit, Units

#: Of each a weight, and what left^T right is to be added to its gradient, see fused_linear.py.
PutOff = list[tuple[nn.Parameter, Tensor, Tensor]]


class Staged:
    """The units of the stages that this rank owns.

    `stages[s]` are those that stage s uses; `last` those whose gradients are summed last, in order.
    """

    def __init__(
        self,
        units: Units,
        stages: Mapping[int, Sequence[Unit]],
        last: Sequence[Unit],
        sums: Reductions,
        facts: Facts,
    ) -> None:
        self.units, self.stages, self.last = units, dict(stages), list(last)
        self.sums, self.facts = sums, facts
        self.mute = False  # whether gradients of this backward pass count for nothing
        self.reduced: set[int] = set()  # stages, since `begin`
        self.waiting: PutOff = []
        self.places: dict[nn.Parameter, tuple[Flat, int]] = {}
        for unit in units.order:
            for group in unit.trained:
                for index, p in enumerate(group.params):
                    self.places[p] = group, index
                    p.register_post_accumulate_grad_hook(weakly(self.collected))

    def require_copyable(self) -> None:
        """Raise InputError: a copy of the model would have this rank's stages only."""
        raise no_copy("model in stages")

    def begin(self, *, training: bool = True) -> None:
        """A run of the schedule begins; the last of a step is the one that sums (`sums.sync`)."""
        self.reduced = set()
        if training:
            self.facts.phase("forward")
            self.facts.buffers.refresh()

    def gather(self, stage: int) -> None:
        """Make the parameters of a stage whole."""
        for unit in self.stages[stage]:
            unit.begin_gather()
        for unit in self.stages[stage]:
            unit.gather()

    def free(self, stage: int) -> None:
        """Give the whole parameters of a stage up."""
        for unit in self.stages[stage]:
            unit.free()

    def product(self, p: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add left^T right to the gradient of `p` (fused_linear.py)."""
        group, index = self.places[p]
        if not self.mute:
            group.add_product(index, left, right, 1.0)

    def rows(self, p: nn.Parameter, ids: Tensor, grad: Tensor) -> None:
        """Add `grad` to the rows `ids` of the gradient of `p` (fused_linear.py)."""
        group, index = self.places[p]
        if not self.mute:
            group.add_rows(index, ids, grad, 1.0)

    def put_off(self, p: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """In I: a product for W, which `later` gives out."""
        self.waiting.append((p, left, right))

    def later(self) -> PutOff:
        """The products that were put off since the last time."""
        waiting, self.waiting = self.waiting, []
        return waiting

    @torch.no_grad()
    def multiply(self, products: PutOff) -> None:
        """In W: add them to the gradients, the last layer's first; each is let go of at once."""
        products.reverse()
        while products:
            self.product(*products.pop())

    def collected(self, p: nn.Parameter) -> None:
        """Take the gradient that was left on `p`."""
        group, index = self.places[p]
        p.grad = None if self.mute else p.grad
        group.collect(index, 1.0)

    def reduce(self, stage: int) -> None:
        """Begin the sums of a stage's gradients; of units that a later reduction takes, not yet."""
        self.reduced.add(stage)
        if not self.sums.sync:
            return
        self._reduce([unit for unit in self.stages[stage] if unit not in self.last])

    def _reduce(self, units: Iterable[Unit]) -> None:
        ready = [unit for unit in units if self._users(unit) <= self.reduced]
        self.sums.begin()
        self.sums.end(ready)

    def _users(self, unit: Unit) -> set[int]:
        return {stage for stage, units in self.stages.items() if unit in units}

    def end(self) -> None:
        """The last row of the step is done: begin the sums that are left."""
        if self.sums.sync:
            self._reduce(self.last)

    def abandon(self) -> None:
        """A step broke off: what it left of gradients is dropped, so that the next begins clean."""
        self.sums.finish()
        self.waiting = []
        self.units.drop()
