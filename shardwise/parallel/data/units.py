"""this file is the units of a model between two passes: at rest, shown, published.

    update     rest: no unit whole      show: with their gradients, the optimizer's turn
    after it   publish: begin to gather what the row keeps whole      wait: until that is done

What happens to them during a pass is for those who drive it: hooks (hooks.py), a schedule
(staged_hooks.py).
"""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from shardwise.core.hook import in_backward


class Unit(Protocol):
    """What is gathered and freed at once (hooks.py)."""

    temporary: bool

    @property
    def groups(self) -> Sequence[Any]: ...
    @property
    def trained(self) -> Sequence[Any]: ...
    def begin_gather(self) -> None: ...
    def gather(self) -> None: ...
    def free(self) -> None: ...
    def show(self) -> None: ...


U = TypeVar("U", bound=Unit)


class Units(Generic[U]):
    """All units, in the order in which a forward pass uses them."""

    def __init__(self, order: Sequence[U]) -> None:
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
