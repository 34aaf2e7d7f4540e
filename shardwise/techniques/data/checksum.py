"""Checksums of tensors: sums with fixed weights, which change if elements change or swap places.

folded      WEIGHTS sums, each of every WEIGHTS-th element of flat x
weighted    their sum with the weights cos(i): close for tensors that are close
exact       their sum with whole weights: for integers, and for the bits of floats
"""

import torch
from torch import Tensor

#: The number of weights, which repeat.  It is prime, so that it divides no tensor's rows.
WEIGHTS = 509
#: A large prime, which makes the whole weights differ.
PRIME = 2_305_843_009_213_693_951
#: By bytes of an element, the integers that have its bits.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fold(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of each WEIGHTS-th element of flat `x`, in `dtype`."""
    flat = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).detach().reshape(-1)
    rows = flat[: len(flat) - len(flat) % WEIGHTS].view(-1, WEIGHTS)
    folded = rows.sum(0, dtype=dtype)
    rest = flat[rows.numel() :]
    folded[: len(rest)] += rest
    return folded.nan_to_num(1, 2, 3)  # for masks that contain -inf


def weighted_sum(folded: Tensor) -> Tensor:
    """The sum of a folded tensor of doubles: a double, 0-d."""
    return folded.dot(torch.arange(WEIGHTS, dtype=torch.float64, device=folded.device).cos())


def weighted(x: Tensor) -> Tensor:
    """The weighted sum of `x`, on its device."""
    return weighted_sum(fold(x, torch.float64))


def exact_sum(folded: Tensor) -> Tensor:
    """The sum of a folded tensor of int64: an integer, 0-d.

    Its weights are odd: an even one would lose the sign of a double.
    """
    weights = torch.arange(1, 2 * WEIGHTS, 2, dtype=torch.int64, device=folded.device)
    return (folded * weights * PRIME).sum()


def bits_sum(x: Tensor) -> Tensor:
    """The exact sum of the bits of `x`, on its device."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return exact_sum(fold(x.detach().reshape(-1).view(INTEGERS[x.element_size()]), torch.int64))
