"""Checksums of tensors, and what the ranks compare with them.

folded      WEIGHTS sums, each of every WEIGHTS-th element of flat x
weighted    their sum with the weights cos(i): close for tensors that are close
exact       their sum with whole weights: for integers, and for the bits of floats

The weights are fixed: a sum changes if elements change or swap places. Results of one microbatch on
two ranks (rerun.py) are the loss, then gradients by name; they must be equal to the last bit.

    own(k)      of the first microbatch of data rank k, by rank k
    again(k)    of the same, by the next rank
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch import Tensor

from shardwise.core.errors import bad
from shardwise.core.tools.tree import leaves

#: The number of weights, which repeat. It is prime, so that it divides no tensor's rows.
WEIGHTS = 509
#: A large prime, which makes the whole weights differ.
PRIME = 2_305_843_009_213_693_951
#: The number of checksums of shares, a prime; the square of each, summed over 8192 ranks, is exact.
SHARE_CHECKSUMS = 1_048_573
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


def beside_tensors(batch: Any) -> int:
    """A hash of the numbers in a batch; 0 without any."""
    found = sorted(map(repr, leaves(batch, NUMBERS)))
    return text_hash(repr(found)) if found else 0


def batch_checksum(batch: Any, device: torch.device) -> Tensor:
    """Three numbers: an exact checksum of shapes and integers, then a sum and a norm of floats."""
    exact = torch.zeros((), dtype=torch.int64, device=device) + beside_tensors(batch)
    sums, sizes = [exact.new_zeros(()).double()], [exact.new_zeros(()).double()]
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
    """A checksum of a batch, a whole number, and its square: doubles that ranks may sum."""
    if not any(x.numel() for x in leaves(batch, Tensor, objects=True)):
        return torch.zeros(2, dtype=torch.float64, device=device)
    exact, sums, sizes = batch_checksum(batch, device)
    mixed = exact.long() + sums.view(torch.int64) * 31 + sizes.view(torch.int64) * 37
    share = (mixed % SHARE_CHECKSUMS).double()
    return torch.stack([share, share**2])


# --- reruns -------------------------------------------------------------------------------------

LOSS: Final = "the loss"
#: A relative difference that hosts of two kinds of processors reach by rounding.
ROUNDING, ROUNDING_16_BIT = 1e-5, 1e-2


class Values(NamedTuple):
    """Of a tensor: its bits as a number, a weighted sum, the norm, and what is rounding."""

    bits: int
    total: float
    norm: float
    rounding: float

    def differs(self, other: "Values") -> bool:
        """Whether they differ by more than rounding."""
        close = self.rounding * max(self.norm, other.norm)
        return not (abs(self.total - other.total) <= close and abs(self.norm - other.norm) <= close)


def numbers_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """The `Values` of a tensor, on its device."""
    wide = torch.view_as_real(x).double() if x.is_complex() else x.double()
    rounding = ROUNDING_16_BIT if x.element_size() < 4 else ROUNDING
    return bits_sum(x), weighted(wide), wide.norm(), rounding


class Computed:
    """Of one microbatch, as one rank computed it: the loss and each gradient."""

    def __init__(self) -> None:
        self.numbers: dict[str, tuple[Tensor, Tensor, Tensor, float]] = {}

    def see(self, name: str, x: Tensor) -> None:
        self.numbers[name] = numbers_of(x)

    def hash(self, names: Sequence[str], rank: int) -> Tensor:
        """A number of all bits, 0-d, which depends on the rank of the microbatch. Otherwise the
        same fault in two passes of one rank would cancel.
        """
        (device,) = {bits.device for bits, *_ in self.numbers.values()}
        none = torch.zeros((), dtype=torch.int64, device=device)
        bits = [self.numbers[name][0] if name in self.numbers else none for name in names]
        return exact_sum(fold(torch.stack(bits), torch.int64)) * (2 * rank + 1)

    def values(self) -> dict[str, Values]:
        """Waits for the device."""
        return {
            name: Values(int(bits), total.item(), norm.item(), rounding)
            for name, (bits, total, norm, rounding) in self.numbers.items()
        }


class Reruns(NamedTuple):
    """A rank's results of one step for its own microbatch, and again for another rank's.

    names    of all that may have a gradient
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
        names = (LOSS, *self.names)
        own, again = self.own.hash(names, self.rank), self.again.hash(names, self.of)
        return (own.remainder(hashes) - again.remainder(hashes)).double().to(device)


#: What a rank shows the others: its own values, those of the microbatch of `of`, and `of`.
Shown = tuple[Mapping[str, Values], Mapping[str, Values], int]


def shown(reruns: Reruns | None) -> Shown | None:
    """What the ranks exchange if the sum is not 0."""
    return reruns and (reruns.own.values(), reruns.again.values(), reruns.of)


def require_same(every: Sequence[Shown | None], step: int, place: Callable[[int], str]) -> None:
    """Raise InputError if two ranks computed different values; warn if they differ by rounding.
    `every` has the data ranks; `place` names one. Of several pairs that differ, the error has the
    rank that is in most of them: with three or more ranks, the one that is wrong.
    """
    pairs = [
        (each[2], rank)
        for rank, each in enumerate(every)
        if each is not None and _first(every, each[2], rank) is not None
    ]
    if not pairs:
        return
    count = Counter(rank for pair in pairs for rank in pair)
    of, rank = max(pairs, key=lambda pair: sum(count[each] for each in pair))
    name, own, again = _first(every, of, rank) or (LOSS, None, None)
    both = f"on {place(of)}: {_text(own)}; computed again on {place(rank)}: {_text(again)}"
    if own and again and not own.differs(again):
        warnings.warn(
            f"{name} in step {step} {both}. They differ by rounding: the processors are not of one "
            "kind, or a kernel adds in no fixed order (torch.use_deterministic_algorithms).",
            stacklevel=2,
        )
        return
    suspect = max((of, rank), key=lambda each: count[each])
    several = count[of] != count[rank]
    raise bad(
        f"{name} in step {step} {both}",
        "the same loss and gradients of a microbatch on each rank that computes it",
        f"{'another machine for ' + place(suspect) if several else 'a test of both machines'}, and "
        "a run that continues from a checkpoint before this step. If other runs differ too, "
        "something that the model computes depends on the rank",
    )


def _first(
    every: Sequence[Shown | None], of: int, rank: int
) -> tuple[str, Values | None, Values | None] | None:
    """The first difference in the order of computation: the loss, then gradients from the last."""
    theirs, again = every[of], every[rank]
    if theirs is None or again is None:
        return None
    own, repeated = theirs[0], again[1]
    for name in dict.fromkeys((*own, *repeated)):
        a, b = own.get(name), repeated.get(name)
        if a is None or b is None or a.bits != b.bits:
            return (name if name == LOSS else f"the gradient of {name}"), a, b
    return None


def _text(values: Values | None) -> str:
    return "none" if values is None else f"norm {values.norm:.9g}"
