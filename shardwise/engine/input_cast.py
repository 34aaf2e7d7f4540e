"""A forward pre-hook that casts the floating-point inputs of a layer to a dtype.

It is copied with its module.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.tools.tree import mapped


@dataclass(frozen=True)
class InputCast:
    """Casts real floating-point tensors in the arguments of a call, in nested containers too."""

    dtype: torch.dtype

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            x = args[0]  # the usual call, quickly
            return None if x.dtype == self.dtype else ((self._cast(x),), kwargs)
        return mapped(self._cast, args, Tensor), mapped(self._cast, kwargs, Tensor)

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if x.is_floating_point() and x.dtype != self.dtype else x
