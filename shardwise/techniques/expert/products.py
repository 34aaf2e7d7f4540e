"""The feed-forward networks of experts: grouped products where torch has them, else a loop.

    rows [N, D] by expert      counts[e] rows for expert e      gate, up [E, F, D], down [E, D, F]

    loop       for each expert      down(silu(gate x) * up x)     3 E products, 9 E with backward
    grouped    all experts at once  the same                      3 products, 9 with backward

`torch.nn.functional.grouped_mm` multiplies the rows of all experts in one call. It saves what a
call costs for each expert, and the stacking of the experts' gradients. On a CPU it is faster or
slower with 4 experts, depending on the rows, and three times as fast with 64
(benchmarks/results/experts.toml).
"""

from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

#: From so many experts on grouped products are not slower.
LEAST: Final = 8
#: Rows and matrices begin at multiples of so many bytes, or torch refuses them.
ALIGNED_BYTES: Final = 16
#: Stacked weights gate, up [E, F, D] and down [E, D, F].
Stacks = tuple[Tensor, Tensor, Tensor]


def feed_forward(rows: Tensor, counts: list[int], stacks: Stacks) -> Tensor:
    """down(silu(gate x) * up x) for rows by expert, [N, D] to [N, D].

    An expert without rows has a gradient of zeros.
    """
    of = grouped if fits(rows, stacks) else looped
    return of(rows, counts, stacks)


def fits(rows: Tensor, stacks: Stacks) -> bool:
    """Whether grouped products can compute these, and are not slower.

    What is read is the same in a recomputation. Dispatch modes that count, keep or replace
    operations expect the usual ones, as do tensors without data.
    """
    if len(stacks[0]) < LEAST or not len(rows) or rows.is_meta:
        return False
    if torch._C._len_torch_dispatch_stack():
        return False
    same = all(p.dtype == rows.dtype and p.is_contiguous() for p in stacks)
    widths = (p.shape[-1] * p.element_size() for p in stacks)
    places = (p.data_ptr() for p in stacks)
    aligned = not any(number % ALIGNED_BYTES for number in (*widths, *places))
    return same and aligned and has_grouped_products(rows.device.type, rows.dtype)


@lru_cache(maxsize=64)
def has_grouped_products(device: str, dtype: torch.dtype) -> bool:
    """Whether this torch multiplies groups of this dtype on such a device, backward too."""
    if not hasattr(functional, "grouped_mm"):
        return False
    with _disable_current_modes(), torch.enable_grad():
        x = torch.ones(2, 16, device=device, dtype=dtype, requires_grad=True)
        weight = torch.ones(2, 16, 16, device=device, dtype=dtype, requires_grad=True)
        try:
            made = _product(x, weight, torch.tensor([1, 2], device=device, dtype=torch.int32))
            torch.autograd.grad(made, (x, weight), torch.ones_like(made))
        except (RuntimeError, NotImplementedError):  # not for this dtype or this device
            return False
    return True


def looped(rows: Tensor, counts: list[int], stacks: Stacks) -> Tensor:
    """One expert after the other."""
    made = [
        functional.linear(
            functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down
        )
        for x, gate, up, down in zip(rows.split(counts), *stacks, strict=True)
    ]
    return torch.cat(made)


def grouped(rows: Tensor, counts: list[int], stacks: Stacks) -> Tensor:
    """All experts in one product for each of the three weights."""
    gate, up, down = stacks
    ends = torch.tensor(counts, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
    ends = ends.to(rows.device)
    hidden = functional.silu(_product(rows, gate, ends)) * _product(rows, up, ends)
    return _Dense.apply(_product(hidden, down, ends))


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """X [N, in], weight [E, out, in] -> [N, out]; expert e has the rows up to ends[e]."""
    return functional.grouped_mm(x, weight.mT, offs=ends)


class _Dense(torch.autograd.Function):
    """The same tensor; its gradient is stored row by row, which the product needs backward."""

    @staticmethod
    def forward(_: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()
