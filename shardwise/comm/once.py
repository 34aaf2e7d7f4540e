"""this file is a backward pass that is not differentiated in turn, and pays for that only if asked.

torch's `once_differentiable` switches gradients off and on around every call, which in the middle
of a step takes longer than many a backward pass; as a rule they are off already.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of an autograd function; whoever differentiates what it gives is refused."""
    refusing = once_differentiable(backward)

    @wraps(backward)
    def chosen(ctx: Any, *grads: Any) -> Any:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *grads)

    return chosen
