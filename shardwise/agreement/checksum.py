"""Checksums of tensors, and what the ranks compare with them.

folded      WEIGHTS sums, each of every WEIGHTS-th element of flat x
weighted    their sum with the weights cos(i): close for tensors that are close
exact       their sum with whole weights: for integers, and for the bits of floats

The weights are fixed: a sum changes if elements change or swap places. Results of one microbatch on
two ranks (rerun.py) must be equal to the last bit.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import chain
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch import Tensor

from shardwise.core.errors import bad
from shardwise.core.tools.tree import leaves

#: The number of weights, which repeat. It is prime, so that it divides no tensor's rows.
WEIGHTS = 509
#: A large prime, which makes the whole weights differ.
PRIME = 2_305_843_009_213_693_951
#: The number of hashes of shares, a prime; the square of each, summed over 8192 ranks, is exact.
SHARE_HASHES = 1_048_573
NUMBERS: Final = int, float, bool
Options = dict[str, Any]
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
    return weighted_sum(fold(x, torch.float64))


def exact_sum(folded: Tensor) -> Tensor:
    """The sum of a folded int64 tensor: 0-d. An even weight would lose the sign of a double."""
    weights = torch.arange(1, 2 * WEIGHTS, 2, dtype=torch.int64, device=folded.device)
    return (folded * weights * PRIME).sum()


def bits_sum(x: Tensor) -> Tensor:
    """The exact sum of the bits of `x`, on its device."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return exact_sum(fold(x.detach().reshape(-1).view(INTEGERS[x.element_size()]), torch.int64))


def has_bits(x: object) -> TypeGuard[Tensor]:
    """Whether `bits_sum` can tell what it is: plain values, which nothing computed."""
    return type(x) is Tensor and x.layout == torch.strided and not (x.is_meta or x.grad_fn)


def text_hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


def versions(states: Iterable[Mapping[Any, Any]]) -> int:
    """A number that changes if a tensor in `states` is written to, added, or replaced."""
    every = (x for state in states for x in state.values())
    return sum(id(x) + x._version for x in every if isinstance(x, Tensor))


def batch_hash(batch: Any, hashes: int, device: torch.device, *, floats: bool) -> Tensor:
    """A whole number below `hashes`, as a double: of the shapes and bits of the tensors in a batch,
    and of its numbers; a few kernels a tensor. Without `floats`, of whole numbers alone.
    """
    beside = sorted(map(repr, leaves(batch, NUMBERS)))
    found = torch.zeros((), dtype=torch.int64, device=device)
    found = found + (text_hash(repr(beside)) if beside else 0)
    for x in _strided(batch):
        kind = text_hash(f"{x.shape} {x.dtype}")
        found = found + kind
        with suppress(RuntimeError):  # quantised tensors
            if floats or not (x.is_floating_point() or x.is_complex()):
                found = found + (bits_sum(x) * (2 * kind + 1)).to(device)
    return found.remainder(hashes).double()


def _strided(batch: Any) -> list[Tensor]:
    every = leaves(batch, Tensor, objects=True)
    return [x for x in every if type(x) is Tensor and x.layout == torch.strided]


def batch_values(batch: Any, device: torch.device) -> Tensor:
    """The `Values` of a batch without the last: [3]. `bits` is of all but floats."""
    folded: list[Tensor] = []
    for x in _strided(batch):
        with suppress(RuntimeError):  # torch cannot sum quantised and float8 tensors
            if x.is_floating_point() or x.is_complex():
                folded.append(fold(x, torch.float64).to(device))
    none = torch.zeros((), dtype=torch.float64, device=device)
    total = sum(map(weighted_sum, folded), start=none)
    norm = sum((x.norm() for x in folded), start=none)
    return torch.stack([batch_hash(batch, 2**52, device, floats=False), total, norm])


def share_numbers(batch: Any, device: torch.device) -> Tensor:
    """A hash of a batch, 0 without elements, and its square: doubles that ranks may sum."""
    if not any(x.numel() for x in leaves(batch, Tensor, objects=True)):
        return torch.zeros(2, dtype=torch.float64, device=device)
    share = batch_hash(batch, SHARE_HASHES, device, floats=True)
    return torch.stack([share, share**2])


# --- values that ranks compare ------------------------------------------------------------------

LOSS: Final = "the loss"
#: A relative difference that hosts of two kinds of processors reach by rounding; of batches.
ROUNDING, ROUNDING_16_BIT, ROUNDING_OF_BATCHES = 1e-5, 1e-2, 1e-6


class Values(NamedTuple):
    """Of a tensor: its bits as a number, a weighted sum, the norm, and what is rounding."""

    bits: float
    total: float
    norm: float
    rounding: float

    def differs(self, other: "Values") -> bool:
        close = self.rounding * max(self.norm, other.norm)
        pairs = (self.total, other.total), (self.norm, other.norm)
        return not all(math.isclose(a, b, rel_tol=0.0, abs_tol=close) for a, b in pairs)


def other_batches(values: Iterable[Tensor]) -> list[int]:
    """The ranks whose `batch_values` differ from those of the first."""
    every = torch.stack([*values]).tolist()
    first, *others = (Values(*x, rounding=ROUNDING_OF_BATCHES) for x in every)
    differ = (each.bits != first.bits or each.differs(first) for each in others)
    return [rank for rank, other in enumerate(differ, start=1) if other]


#: The `Values` of a tensor, on its device.
Numbers = tuple[Tensor, Tensor, Tensor, float]


def numbers_of(x: Tensor) -> Numbers:
    wide = torch.view_as_real(x).double() if x.is_complex() else x.double()
    rounding = ROUNDING_16_BIT if x.element_size() < 4 else ROUNDING
    return bits_sum(x), weighted(wide), wide.norm(), rounding


def read(numbers: Numbers) -> Values:
    """Waits for the device."""
    bits, total, norm, rounding = numbers
    return Values(int(bits), total.item(), norm.item(), rounding)


#: By a tensor's name, and what tells it from others of the name.
Table = Mapping[tuple[str, Any], Values]


def odd_values(every: Sequence[Table]) -> list[tuple[tuple[str, Any], int, int]]:
    """Of tensors that are not equal on all ranks that have them: the key, each rank that differs
    from most, and the first rank with what most have.
    """
    found: list[tuple[tuple[str, Any], int, int]] = []
    for key in dict.fromkeys(chain.from_iterable(every)):
        bits = {rank: own[key].bits for rank, own in enumerate(every) if key in own}
        usual, _ = Counter(bits.values()).most_common(1)[0]
        first = next(rank for rank in bits if bits[rank] == usual)
        found += [(key, rank, first) for rank in bits if bits[rank] != usual]
    return found


#: Of one microbatch, as one rank computed it: the loss and each gradient, by name.
Computed = dict[str, Numbers]


class Reruns(NamedTuple):
    """A rank's results of one step for its own microbatch, and again for another rank's.

    names    of all that may have a value
    rank     this data rank
    of       the data rank whose microbatch it computed again
    """

    own: Computed
    again: Computed
    names: Sequence[str]
    rank: int
    of: int

    def difference(self, hashes: int, device: torch.device) -> Tensor:
        """A double; the sum over all ranks is 0 if all computed the same."""
        own, again = self._hash(self.own, self.rank), self._hash(self.again, self.of)
        return (own.remainder(hashes) - again.remainder(hashes)).double().to(device)

    def _hash(self, computed: Computed, rank: int) -> Tensor:
        """A number of all bits, 0-d, which depends on the rank of the microbatch. Otherwise the
        same fault in two passes of one rank would cancel.
        """
        (device,) = {bits.device for bits, *_ in computed.values()}
        none = torch.zeros((), dtype=torch.int64, device=device)
        bits = [computed[name][0] if name in computed else none for name in self.names]
        return exact_sum(fold(torch.stack(bits), torch.int64)) * (2 * rank + 1)

    def values(self) -> Table:
        """By name and data rank of the microbatch, in the order of computation; zeros without a
        value.
        """
        found: dict[tuple[str, Any], Values] = {}
        for computed, rank in ((self.own, self.rank), (self.again, self.of)):
            for name in dict.fromkeys((*computed, *self.names)):
                numbers = computed.get(name)
                found[name, rank] = Values(0, 0.0, 0.0, 0.0) if numbers is None else read(numbers)
        return found


def require_reruns(every: Sequence[Table], step: int, place: Callable[[int], str]) -> None:
    """Raise InputError if two ranks computed different values; warn if they differ by rounding.
    `every` has the data ranks; `place` names one. Of several pairs that differ, the error has the
    rank that is in most of them: with three or more ranks, the one that is wrong.
    """
    pairs: dict[tuple[int, int], tuple[str, Any]] = {}  # a rank, and that which repeated it
    for key, one, other in odd_values(every):
        pairs.setdefault((key[1], one + other - key[1]), key)
    if not pairs:
        return
    count = Counter(chain.from_iterable(pairs))
    of, rank = max(pairs, key=lambda pair: sum(count[each] for each in pair))
    key = pairs[of, rank]
    own, again = every[of][key], every[rank][key]
    both = f"on {place(of)}: norm {own.norm:.9g}; computed again on {place(rank)}: norm "
    both += f"{again.norm:.9g}"
    if not own.differs(again):
        warnings.warn(
            f"{key[0]} in step {step} {both}. They differ by rounding: the processors are not of "
            "one kind, or a kernel adds in no fixed order (torch.use_deterministic_algorithms).",
            stacklevel=2,
        )
        return
    suspect = max((of, rank), key=lambda each: count[each])
    several = count[of] != count[rank]
    raise bad(
        f"{key[0]} in step {step} {both}",
        "the same loss and gradients of a microbatch on each rank that computes it",
        f"{'another machine for ' + place(suspect) if several else 'a test of both machines'}, and "
        "a run that continues from a checkpoint before this step. If other runs differ too, "
        "something that the model computes depends on the rank",
    )
