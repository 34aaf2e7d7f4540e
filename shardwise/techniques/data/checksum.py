"""Checksums of tensors: sums with fixed weights, which change if elements change or swap places.

folded      WEIGHTS sums, each of every WEIGHTS-th element of flat x
weighted    their sum with the weights cos(i): close for tensors that are close
exact       their sum with whole weights: for integers, and for the bits of floats
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from shardwise.core.tools.tree import leaves

#: The number of weights, which repeat.  It is prime, so that it divides no tensor's rows.
WEIGHTS = 509
#: A large prime, which makes the whole weights differ.
PRIME = 2_305_843_009_213_693_951
#: The number of checksums of shares, a prime; the square of each, summed over 8192 ranks, is exact.
SHARE_CHECKSUMS = 1_048_573
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


def text_hash(text: str) -> int:
    """A hash of a text, of 56 bits."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


def versions(states: Iterable[Mapping[Any, Any]]) -> int:
    """A number that changes if a tensor in `states` is written to, added, or replaced."""
    every = (x for state in states for x in state.values())
    return sum(id(x) + x._version for x in every if isinstance(x, Tensor))


def batch_checksum(batch: Any, device: torch.device) -> Tensor:
    """Three numbers: an exact checksum of shapes and integers, then a sum and a norm of floats."""
    exact = torch.zeros((), dtype=torch.int64, device=device)
    sums, sizes = [exact.double()], [exact.double()]
    tensors = leaves(batch, Tensor, objects=True)
    for x in (x for x in tensors if type(x) is Tensor and x.layout == torch.strided):
        exact = exact + text_hash(f"{x.shape}")
        with suppress(RuntimeError):  # torch cannot sum quantised and float8 tensors
            if x.is_floating_point() or x.is_complex():
                folded = fold(x, torch.float64)
                sums.append(weighted_sum(folded).to(device))
                sizes.append(folded.norm().to(device))
            else:
                exact = exact + exact_sum(fold(x, torch.int64)).to(device)
    return torch.stack(
        [(exact % 2**52).double(), torch.stack(sums).sum(), torch.stack(sizes).sum()]
    )


def share_numbers(batch: Any, device: torch.device) -> Tensor:
    """A checksum of a batch, a whole number, and its square: doubles that ranks may sum.

    They stay on the device; zeros for a batch without elements.
    """
    if not any(x.numel() for x in leaves(batch, Tensor, objects=True)):
        return torch.zeros(2, dtype=torch.float64, device=device)
    exact, sums, sizes = batch_checksum(batch, device)
    mixed = exact.long() + sums.view(torch.int64) * 31 + sizes.view(torch.int64) * 37
    share = (mixed % SHARE_CHECKSUMS).double()
    return torch.stack([share, share**2])
