"""What all data ranks must have alike, compared by one number that they sum in each step.

    options    of the optimizer's groups: rates, betas, weight decay             in each step
    weights    that several data ranks hold: all of them under ddp, the          every `every` steps
               shards of hybrid sharding, what zero1 and zero2 keep gathered

Of n ranks that hold the same, rank r contributes a multiple of its hash h:

    (n - 1) h(0)  on the first,   - h(r)  on each other;   the sum is 0 if all hashes are equal

The sums are of whole numbers in doubles: they are exact.  Hashes of weights stay on the device.
Only if the sum is not 0, the ranks exchange names and values, and the error shows them.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.objects import gather_object
from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.parallel.data.flat_parameter import Flat

#: Steps between two comparisons of weights, unless an engine says otherwise.
EVERY = 100
#: A relative difference of weights that hosts of two kinds of processors reach by rounding.
ROUNDING, ROUNDING_16_BIT = 1e-5, 1e-2
#: The number of weights in a checksum, which repeat: a prime, which divides no tensor's rows.
_WEIGHTS = 509
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SameOnRanks:
    """What this data rank has, and what the ranks find when it is not what the others have.

    options    by name, set before each step
    every      steps between two comparisons of weights; 0: none
    """

    def __init__(self, axes: Sequence[Axis], flats: Sequence[Flat], hashes: int) -> None:
        self.axes, self.flats, self.hashes, self.every = axes, flats, hashes, EVERY
        self.options: dict[str, Any] = {}
        self.sent: dict[str, Any] = {}  # the options that the ranks compare
        self.weighs = False  # whether they compare weights too
        shard, replicate = axes
        self.rank = replicate.rank * shard.size + shard.rank
        self.ranks = shard.size * replicate.size
        #: in a traced world all ranks are this one, and their contributions would not sum to 0
        self.compares = any(axis.transport.answered for axis in axes)
        # not those of experts and of layers with another mesh, and none that another tier updates
        own = [f for f in flats if f.shard_axis is shard and f.replicate_axis is replicate]
        own = [f for f in own if f.moves.fetch is None]
        self.everywhere = [f for f in own if not (f.split and f.reshards)]
        self.replicated = [f for f in own if f.split and f.reshards and replicate.size > 1]

    def difference(self, step: int) -> int | Tensor:
        """This rank's contribution in step `step`, from 0; a double on the device with weights."""
        self.sent, self.options = self.options, {}
        if not self.compares:
            return 0
        self.weighs = self.every > 0 and step % self.every == 0
        digest = blake2b(repr(sorted(self.sent.items())).encode(), digest_size=7).digest()
        own = self._share(self.rank, self.ranks) * (int.from_bytes(digest, "big") % self.hashes)
        replicate = self.axes[1]
        shares = [self._share(self.rank, self.ranks), self._share(replicate.rank, replicate.size)]
        for share, flats in zip(shares, [self.everywhere, self.replicated], strict=True):
            for values in map(_weight, flats) if self.weighs else ():
                own = own + share * _bits(values).remainder(self.hashes).double()
        return own

    def _share(self, rank: int, ranks: int) -> int:
        return -1 if rank else ranks - 1

    def require(self) -> None:
        """The sum is not 0: all data ranks exchange what they have.

        Raises InputError for what differs; warns if weights differ by rounding.  Options that a
        rank does not have are no difference, unless it has none at all: groups may be made by the
        shapes of pieces.
        """
        weights = dict(self._weights()) if self.weighs else {}
        every: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [(self.sent, weights)]
        for axis in self.axes:
            parts = gather_object(every, axis, self._device)
            every = [each for part in parts for each in part]
        first = every[0][0]
        for rank, (options, _) in enumerate(every):
            for name in sorted({*first, *options}, key=lambda name: (name[:3] != "lr ", name)):
                both = name in options and name in first
                if (both and options[name] != first[name]) or not (options and first):
                    raise _other_option(name, rank, options, first)
        for rank, (_, weights) in enumerate(every):
            self._require_weights(rank, weights, [each for _, each in every])

    def _require_weights(
        self, rank: int, own: Mapping[str, Any], every: Sequence[Mapping[str, Any]]
    ) -> None:
        for name, (bits, total, norm, split, rounding) in own.items():
            first = rank % self.axes[0].size if split else 0
            of_first = every[first].get(name, ())
            if not of_first or of_first[0] == bits:
                continue
            close = rounding * max(norm, of_first[2])
            if abs(total - of_first[1]) <= close and abs(norm - of_first[2]) <= close:
                _warn_of_rounding(name, rank, first)
                return
            raise bad(
                f"{name} on data rank {rank}, whose norm is {norm:.9g}; on data rank {first} its "
                f"norm is {of_first[2]:.9g}",
                "weights that are the same on all data ranks, which must all change them alike",
                "the same change on every rank, or sw.load on every rank",
            )

    @property
    def _device(self) -> torch.device:
        return next(flat.full.device for flat in self.flats)

    def _weights(self) -> Iterator[tuple[str, tuple[int, float, float, bool, float]]]:
        """Of each parameter: the bits, a weighted sum, the norm, whether it is split; rounding."""
        for flat in [*self.everywhere, *self.replicated]:
            split = flat in self.replicated
            values, views = _weight(flat), flat.views
            parts = [views.part(i, values) for i in range(len(flat.params))] if split else ()
            rounding = ROUNDING_16_BIT if values.element_size() < 4 else ROUNDING
            for name, x in zip(flat.names, parts or views.every(values), strict=True):
                wide = torch.view_as_real(x).double() if x.is_complex() else x.double()
                total, norm = _weighted(wide).item(), wide.norm().item()
                yield name, (int(_bits(x)), total, norm, split, rounding)


def _other_option(
    name: str, rank: int, options: Mapping[str, Any], first: Mapping[str, Any]
) -> Exception:
    has, of_first = (
        f"{each[name]!r}" if name in each else "none: no optimizer has stepped with it"
        for each in (options, first)
    )
    return bad(
        f"{name} on data rank {rank}: {has}; on data rank 0: {of_first}",
        "the same options of the optimizer, in the same steps, on all data ranks",
        "the change on every rank, without a condition on the rank",
    )


def _warn_of_rounding(name: str, rank: int, first: int) -> None:
    warnings.warn(
        f"The weights {name} on data rank {rank} differ from those on data rank {first} by "
        "rounding, as on hosts with other processors. A checkpoint has those of one of them.",
        stacklevel=2,
    )


def _weight(flat: Flat) -> Tensor:
    """The values of a flat parameter that several ranks hold."""
    return flat.full if flat.split and not flat.reshards else flat.shard


def _fold(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of each _WEIGHTS-th element of flat `x`."""
    x = x.reshape(-1)
    rows = x[: len(x) - len(x) % _WEIGHTS].view(-1, _WEIGHTS)
    folded, rest = rows.sum(0, dtype=dtype), x[rows.numel() :]
    folded[: len(rest)] += rest
    return folded


@torch.no_grad()
def _bits(x: Tensor) -> Tensor:
    """An integer from the bits of `x`, 0-d, on its device."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    folded = _fold(x.detach().reshape(-1).view(_INTEGERS[x.element_size()]), torch.int64)
    weights = torch.arange(1, _WEIGHTS + 1, dtype=torch.int64, device=x.device)
    return (folded * weights * 2_305_843_009_213_693_951).sum()


@torch.no_grad()
def _weighted(x: Tensor) -> Tensor:
    folded = _fold(x.detach(), torch.float64)
    return folded.dot(torch.arange(_WEIGHTS, dtype=torch.float64, device=x.device).cos())
