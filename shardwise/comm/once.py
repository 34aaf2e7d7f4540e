"""A cheaper `once_differentiable`: marks a backward function that cannot itself be differentiated.

torch's version switches gradients off and on around every call, which can take longer than the
backward itself.  This one does so only if gradients are on; usually they are off.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the `backward` of an autograd function.  A double backward through it raises."""
    refusing = once_differentiable(backward)

    @wraps(backward)
    def chosen(ctx: Any, *grads: Any) -> Any:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *grads)

    return chosen
