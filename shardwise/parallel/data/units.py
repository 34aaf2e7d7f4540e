"""The units of a model between two passes: at rest, shown, published.

    update     rest: no unit whole      show: with their gradients, the optimizer's turn
    after it   publish: begin to gather what the row keeps whole      wait: until that is done

What happens to them during a pass is for hooks (hooks.py).
"""

from collections.abc import Sequence

from torch import nn

from shardwise.core.hook import in_backward
from shardwise.parallel.data.flat_parameter import Flat


class Unit:
    """A unit while it is used: its groups, and where in its life it is."""

    def __init__(self, name: str, modules: Sequence[nn.Module], groups: Sequence[Flat]) -> None:
        self.name, self.modules, self.groups = name, list(modules), list(groups)
        self.number = 0  # among all, as they were defined
        self.trained = [group for group in groups if group.trained]
        self.temporary = any(group.temporary for group in groups)
        # looking a row up in a table needs the table only forward
        self.wanted_backward = not all(type(m) is nn.Embedding for m in modules)
        self.reached = True  # gradients arrive at what it gave
        self.keep = False
        self.depth = 0  # forward passes of its modules that are running
        self.used = False  # in a forward pass since it was freed
        self.missing = self.expected = sum(len(group.params) for group in self.trained)
        self.complete = False

    def begin_gather(self) -> None:
        for group in self.groups:
            group.begin_gather()

    def gather(self) -> None:
        for group in self.groups:
            group.begin_gather()
        for group in self.groups:
            group.gather()

    def free(self) -> None:
        self.used = False
        for group in self.groups:
            group.free()

    def show(self) -> None:
        for group in self.groups:
            group.rest()
            if group.trained:
                group.show_grads()


class Units:
    """All units, in the order in which a forward pass uses them."""

    def __init__(self, order: Sequence[Unit]) -> None:
        self.order = list(order)

    def show(self) -> None:
        """Put parameters at rest with their gradients on them: the optimizer's turn."""
        for unit in self.order:
            unit.show()

    def free(self) -> None:
        """No unit whole but those that the row keeps so."""
        for unit in self.order:
            unit.free()

    def rest(self) -> None:
        """Every parameter at rest, no unit whole."""
        self.free()
        for unit in self.order:
            for group in unit.groups:
                group.rest()

    def drop(self) -> None:
        """A step broke off: what it left of gradients is dropped, so that the next begins clean."""
        self.free()
        for unit in self.order:
            for group in unit.trained:
                group.clear()

    def wait(self) -> None:
        """End what `publish` began."""
        for unit in self.order:
            if not unit.temporary:
                unit.gather()

    def step_in_backward(self) -> None:
        """The updates of parameters that have an optimizer to be run in the backward pass.

        Put there by torch.distributed.optim._apply_optimizer_in_backward; the gradient is dropped.
        Raises InputError where parameters are at rest in pieces.
        """
        for group in (group for unit in self.order for group in unit.trained):
            for p in group.params:
                optimizers = getattr(p, "_in_backward_optimizers", ())
                if optimizers and group.split:
                    raise in_backward("sharded parameters")
                for optimizer in optimizers:
                    optimizer.step()
                if optimizers:
                    p.grad = None

    def publish(self) -> None:
        """After the update: begin to gather what is kept whole, in the order of its next use."""
        for unit in self.order:
            if not unit.temporary:
                unit.begin_gather()


def mark_kept(order: Sequence[Unit]) -> None:
    """Mark units around others, which backward needs first and last."""
    for unit in order:
        mine = {m for module in unit.modules for m in module.modules()}
        others = [m for other in order if other is not unit for m in other.modules]
        unit.keep = any(m in mine for m in others)
