"""What must be equal on all ranks, compared by numbers that they sum in each step.

    options    of the optimizer's groups: rates, betas, weight decay             in each step
    weights    that several data ranks hold: all of them under ddp, the          every `every` steps
               shards of hybrid sharding, what zero1 and zero2 keep gathered,
               experts of several ranks; fp32 masters of 16-bit weights
    states     of the optimizer, for such weights                                the same
    reruns     the loss and gradients of a microbatch that two ranks computed    rerun.py

Of n ranks that hold the same, rank r contributes a multiple of its hash h:

    (n - 1) h(0)  on the first,   - h(r)  on each other;   the sum is 0 if all hashes are equal

The sums are of whole numbers in doubles: they are exact.  Hashes of weights stay on the device.
Only if the sum is not 0, the ranks exchange names and values, and the error shows them.  It names
the rank whose bits differ from those of most ranks: with three or more, the one that is damaged.

Tensor ranks and stages of a pipeline have the same options too.  Along their axes a second such sum
is in the message with which they agree on the loss or the norm; it carries on that of the data
ranks, so that all ranks know if any two differ.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from shardwise.comm.objects import gather_object
from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.techniques.data.checksum import bits_sum
from shardwise.techniques.data.computed import Reruns, Values, numbers_of, require_same, shown
from shardwise.techniques.data.flat.flat_parameter import Flat

#: Steps between two comparisons of weights, unless an engine says otherwise.
EVERY = 100
#: The axis of the data ranks that hold the same experts.
_OF_EXPERTS: Final = "edp"
Options = dict[str, Any]


class _Copy(NamedTuple):
    """What this rank has of a flat parameter, as the `rank`-th of `ranks` data ranks that hold it.

    `part` tells it from the parts of the same parameters that other ranks hold. `of_parameters`
    gives names and tensors; `whole` the same as few tensors.
    """

    part: tuple[int, ...]
    rank: int
    ranks: int
    whole: Callable[[], list[Tensor]]
    of_parameters: Callable[[], Iterable[tuple[str, Tensor]]]


def _weights(flat: Flat) -> Tensor:
    return flat.full if flat.split and not flat.reshards else flat.shard


def _named(what: str, flat: Flat, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The name of each parameter, and its values in a flat tensor."""
    pieces = len(values) < flat.plan.padded
    parts = range(len(flat.params)) if pieces else ()
    every = [flat.views.part(i, values) for i in parts] or flat.views.every(values)
    yield from zip((f"{what}{name}" for name in flat.names), every, strict=True)


class SameOnRanks:
    """What this rank has, and what the ranks find when it is not what the others have.

    options    by name, set before each step; None: this rank has nothing to update
    every      steps between two comparisons of weights; 0: none
    step       the number of the step, from 1
    reruns     of this step, if it has one
    others     axes besides the data's, whose ranks have the same options
    """

    def __init__(
        self, axes: Sequence[Axis], flats: Sequence[Flat], hashes: int, device: torch.device
    ) -> None:
        self.axes, self.hashes, self.device, self.every = axes, hashes, device, EVERY
        self.others: Sequence[Axis] = ()
        self.step = 0
        self.reruns: Reruns | None = None
        self.options: Options | None = {}
        self.sent: Options | None = {}  # the options that the ranks compare
        self.hash = 0  # of them
        self.weighs = False  # whether they compare weights too
        self.copies = [
            copy
            for flat in flats
            for copy in self._copies(
                flat,
                flat.split and flat.reshards,
                lambda flat=flat: [_weights(flat)],
                lambda flat=flat: _named("", flat, _weights(flat)),
            )
        ]

    def _copies(
        self,
        flat: Flat,
        split: bool,
        whole: Callable[[], list[Tensor]],
        of_parameters: Callable[[], Iterable[tuple[str, Tensor]]],
    ) -> list[_Copy]:
        """What is compared of a flat parameter: nothing on a disk, and of a mesh of layers."""
        shard, replicate = flat.shard_axis, flat.replicate_axis
        known = all(
            axis.size == 1 or axis.name == _OF_EXPERTS or any(axis is own for own in self.axes)
            for axis in (shard, replicate)
        )
        if not known or flat.moves.fetch == "disk":
            return []
        rank, ranks = replicate.rank, replicate.size
        if not split:
            rank, ranks = rank * shard.size + shard.rank, ranks * shard.size
        experts = _OF_EXPERTS in (shard.name, replicate.name)
        part = shard.rank if split else 0, flat.local.coordinates.get("ep", 0) if experts else 0
        return [_Copy(part, rank, ranks, whole, of_parameters)] if ranks > 1 else []

    def add_masters(self, masters: Mapping[Flat, Tensor]) -> None:
        """Compare the fp32 masters of 16-bit weights too, and name them first."""
        self.copies = [
            copy
            for flat, master in masters.items()
            for copy in self._copies(
                flat,
                flat.split,
                lambda master=master: [master],
                lambda flat=flat, master=master: _named("the fp32 master of ", flat, master),
            )
        ] + self.copies

    def add_states(self, states: Mapping[Flat, Callable[[], Iterable[tuple[str, Tensor]]]]) -> None:
        """Compare the states of the optimizer too, and name them first.

        If weights differ, states stay equal, since ranks sum their gradients. States that
        differ make weights differ in the next update.
        """
        self.copies = [
            copy
            for flat, named in states.items()
            for copy in self._copies(
                flat, flat.split, lambda named=named: [x for _, x in named()], named
            )
        ] + self.copies

    def begin(self, step: int, options: Options) -> None:
        """Step number `step`, from 1, begins with these options."""
        self.step, self.options = step, options

    def difference(self, step: int) -> int | Tensor:
        """This rank's contribution in step `step`, from 0; a double on the device with weights."""
        self.sent, self.options = self.options, None if self.options is None else {}
        self.weighs = self.every > 0 and step % self.every == 0
        text = repr(self.sent and sorted(self.sent.items()))
        digest = blake2b(text.encode(), digest_size=7).digest()
        self.hash = int.from_bytes(digest, "big") % self.hashes
        if not any(axis.transport.answered for axis in self.axes):
            return 0  # alone, or in a traced world, whose ranks are all this one
        own = _share(self.data_rank(), self.data_ranks) * self.hash
        if self.reruns is not None:
            own = own + self.reruns.difference(self.hashes, self.device)
        for copy in self.copies if self.weighs else ():
            for x in copy.whole():
                bits = bits_sum(x).remainder(self.hashes).double()
                own = own + _share(copy.rank, copy.ranks) * bits.to(self.device)
        return own

    @property
    def data_ranks(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def data_rank(self, axis: Axis | None = None, ahead: int = 0) -> int:
        """The place of this rank among the data ranks, or of one `ahead` of it on an axis."""
        shard, replicate = ((each.rank + ahead * (each is axis)) % each.size for each in self.axes)
        return replicate * self.axes[0].size + shard

    def difference_on(self, axis: Axis) -> int:
        """This rank's contribution to the sum over another axis: of the options."""
        return _share(axis.rank, axis.size) * self.hash * axis.transport.answered

    def require(self) -> None:
        """A sum is not 0: all ranks exchange what they have.

        Raises InputError for what differs; warns if numbers differ by rounding.  Options that a
        rank does not have are no difference, unless it has none at all: groups may be made by the
        shapes of pieces.
        """
        weights = dict(self._values()) if self.weighs else {}
        every: list[Any] = [(self.sent, weights, shown(self.reruns))]
        for axis in (*self.axes, *self.others):
            parts = gather_object(every, axis, self.device)
            every = [each for part in parts for each in part]
        self._require_options(
            [(rank, own) for rank, (own, *_) in enumerate(every) if own is not None]
        )
        for start in range(0, len(every), self.data_ranks):
            data_ranks = every[start:][: self.data_ranks]
            reruns = [each for *_, each in data_ranks]
            require_same(reruns, self.step, lambda rank, start=start: self._place(start + rank))
            self._require_weights(start, [each for _, each, _ in data_ranks])

    def _require_options(self, every: Sequence[tuple[int, Options]]) -> None:
        for rank, options in every:
            place, first = every[0]
            for name in sorted({*first, *options}, key=lambda name: (name[:3] != "lr ", name)):
                both = name in options and name in first
                if (both and options[name] != first[name]) or not (options and first):
                    raise _other_option(
                        name, [self._place(rank), self._place(place)], [options, first]
                    )

    def _place(self, rank: int) -> str:
        """The place of a rank in the order of the exchange."""
        number, own = divmod(rank, self.data_ranks)
        several = [("data", own)] if self.data_ranks > 1 else []
        for axis in self.others:
            number, own = divmod(number, axis.size)
            several += [(axis.name, own)] if axis.size > 1 else []
        return ", ".join(f"{name} rank {own}" for name, own in several)

    def _require_weights(self, start: int, every: Sequence[Mapping[Any, Any]]) -> None:
        """Compare the weights of the data ranks that begin with the rank `start`."""
        for key in dict.fromkeys(key for own in every for key in own):
            holders = [rank for rank, own in enumerate(every) if key in own]
            usual, _ = Counter(every[rank][key].bits for rank in holders).most_common(1)[0]
            first = next(rank for rank in holders if every[rank][key].bits == usual)
            for rank in holders:
                if every[rank][key].bits != usual:
                    self._require_close(
                        key[0], [start + rank, start + first], every[rank][key], every[first][key]
                    )
                    return

    def _require_close(
        self, name: str, ranks: Sequence[int], values: Values, usual: Values
    ) -> None:
        places = [self._place(rank) for rank in ranks]
        if not values.differs(usual):
            _warn_of_rounding(name, *places)
            return
        raise bad(
            f"{name} on {places[0]}, whose norm is {values.norm:.9g}; on {places[1]} its norm is "
            f"{usual.norm:.9g}",
            "weights and optimizer states that are equal on all data ranks",
            "the same change on every rank, or sw.load on every rank. If no code changed it, the "
            "memory of the rank that is named first is damaged",
        )

    def _values(self) -> Iterator[tuple[Any, Values]]:
        """Of each parameter: the bits, a weighted sum, the norm, and the rounding."""
        for copy in self.copies:
            for name, x in copy.of_parameters():
                bits, total, norm, rounding = numbers_of(x)
                yield (name, copy.part), Values(int(bits), total.item(), norm.item(), rounding)


def _share(rank: int, ranks: int) -> int:
    return -1 if rank else ranks - 1


def _other_option(name: str, places: Sequence[str], both: Sequence[Options]) -> Exception:
    has, of_first = (
        f"{options[name]!r}" if name in options else "none: no optimizer has stepped with it"
        for options in both
    )
    return bad(
        f"{name} on {places[0]}: {has}; on {places[1]}: {of_first}",
        "the same options of the optimizer, in the same steps, on all ranks",
        "the change on every rank, without a condition on the rank"
        if all(name in options for options in both)
        else "a step on every rank, or on none; a gradient scaler that skips on all is "
        "ShardedGradScaler of torch.distributed.fsdp.sharded_grad_scaler",
    )


def _warn_of_rounding(name: str, place: str, first: str) -> None:
    warnings.warn(
        f"The weights {name} on {place} differ from those on {first} by rounding, as on hosts with "
        "other processors. A checkpoint has those of one of them.",
        stacklevel=2,
    )
