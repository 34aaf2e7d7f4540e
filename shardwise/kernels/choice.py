"""Which kernels compute the layers of a model: torch's own, or faster ones if there are any.

auto     products by the fastest library for this CPU (matmul.py); RMS norms as one node
(rms_norm.py); weight gradients added to the flat gradient (fused_linear.py)
torch    torch's own functions and autograd
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.kernels.fused_linear import Sink, take_over
from shardwise.kernels.matmul import BY_TORCH, Products, fastest
from shardwise.kernels.rms_norm import Norm, fused

__all__ = ["CHOICES", "Kernels", "kernels_of"]

CHOICES: Final = ("auto", "torch")


@dataclass(frozen=True)
class Kernels:
    """How matrices are multiplied, and whether our autograd nodes compute the layers."""

    products: Products = BY_TORCH
    norm: Norm | None = None
    fuse: bool = False

    def install(
        self, model: nn.Module, sink: Sink, sizes: Mapping[nn.Parameter, int], several: bool = False
    ) -> list[RemovableHandle]:
        """Hook the layers of `model` whose weights are in `sizes` (fused_linear.take_over)."""
        if not self.fuse:
            return []
        return take_over(model, self.products, self.norm, sink, sizes, several)


def kernels_of(choice: str, device: torch.device) -> Kernels:
    """The kernels that `choice` names, on `device`."""
    if choice == "torch":
        return Kernels()
    return Kernels(fastest(device), fused(device), fuse=True)
