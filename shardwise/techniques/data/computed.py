"""What two ranks computed of the same microbatches, and which of them differ (rerun.py).

    own(k)      of the first microbatch of data rank k, by rank k
    again(k)    of the same, by the next rank

Each is the loss, then gradients by name; they must be equal to the last bit.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from shardwise.core.errors import bad
from shardwise.techniques.data.checksum import bits_sum, exact_sum, fold, weighted

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
        """It has computed `x`."""
        self.numbers[name] = numbers_of(x)

    def hash(self, names: Sequence[str], rank: int) -> Tensor:
        """A number of all bits, 0-d; `names` are those that it may have.

        It depends on the rank whose microbatch it is, so that the same fault in two passes of one
        rank does not cancel.
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
    """Of one step and one rank: what it computed of its own microbatch, and again of another's.

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

    `every` has the data ranks; `place` names one.  Of several pairs that differ, the one that is
    reported has the rank that is in most of them: with three or more ranks, the one that is wrong.
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
    """What differs first in the order of computation: the loss, then gradients from the last."""
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
