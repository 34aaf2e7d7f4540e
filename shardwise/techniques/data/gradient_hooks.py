"""Our hooks on parameters, among those of the program.

    autograd adds to p.grad --> the program's hooks see it --> ours takes it (`Data.collected`)

The program's hooks may be registered before or after ours.  As under torch's DDP they all see the
gradient of this rank, in the parameter's own shape, and what they change is what is reduced.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardwise.core.tools.weak import owner, weakly
from shardwise.techniques.data.flat.flat_parameter import Flat


class GradientHooks:
    """The hooks that collect gradients, and those that begin a backward pass.

    late   parameters that are collected when the pass ends: a hook of the program came after ours
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []  # of the hook on each parameter
        self.late: list[int] = []
        self.begins: list[RemovableHandle] = []

    def add(
        self, p: nn.Parameter, collected: Callable[[nn.Parameter, int], None]
    ) -> RemovableHandle:
        """Call `collected` after a gradient of `p` is accumulated, with the number of `p`."""
        handle = p.register_post_accumulate_grad_hook(weakly(collected, len(self.numbers)))
        self.numbers.append(handle.id)
        return handle

    def is_last(self, p: nn.Parameter, number: int) -> bool:
        """Whether our hook on `p` is the last; if not, it will be in later passes."""
        hooks: Any = p._post_accumulate_grad_hooks
        own = self.numbers[number]
        if len(hooks) == 1 or next(reversed(hooks)) == own:
            return True
        hooks[own] = hooks.pop(own)
        self.late.append(number)
        return False

    def take_late(self) -> list[int]:
        """The numbers of the parameters to collect at the end of this pass."""
        late, self.late = self.late, []
        return late

    def expect(self, groups: Iterable[Flat], begin: Callable[..., None]) -> None:
        """Call `begin` before autograd adds to pieces of gradients that are still on parameters.

        A pass usually begins with the model's output, but a loss may come from somewhere else.
        """
        for group in () if self.begins else groups:
            if group.split and group.grads.attached:
                self.begins += before_gradients(
                    (p for p in group.params if p.grad is not None), begin
                )

    def begun(self) -> None:
        """The pass has begun."""
        while self.begins:
            self.begins.pop().remove()


def before_gradients(
    params: Iterable[nn.Parameter], begin: Callable[..., None]
) -> list[RemovableHandle]:
    """Call `begin` before autograd adds to the gradient of one of `params`."""
    return [p.register_hook(weakly(begin)) for p in params]


def owners(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, Any]]:
    """The parameters of an optimizer that `GradientHooks.add` has hooked, each with its owner."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        for hook in (p._post_accumulate_grad_hooks or {}).values():
            if (data := owner(hook)) is not None:
                yield p, data
