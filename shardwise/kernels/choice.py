"""What computes the layers of a model.

Products by the fastest library for this CPU (matmul.py), RMS norms as one node (rms_norm.py), and
weight gradients added to the flat gradient (fused_linear.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.kernels.fused_linear import Sink, take_over
from shardwise.kernels.matmul import Products, fastest
from shardwise.kernels.rms_norm import Norm, fused

__all__ = ["Kernels", "kernels_of"]


@dataclass(frozen=True)
class Kernels:
    """How matrices are multiplied, and what computes RMS norms."""

    products: Products
    norm: Norm | None

    def install(
        self, model: nn.Module, sink: Sink, sizes: Mapping[nn.Parameter, int], several: bool = False
    ) -> list[RemovableHandle]:
        """Hook the layers of `model` whose weights are in `sizes` (fused_linear.take_over)."""
        return take_over(model, self.products, self.norm, sink, sizes, several)


def kernels_of(device: torch.device) -> Kernels:
    """The kernels on `device`."""
    return Kernels(fastest(device), fused(device))
