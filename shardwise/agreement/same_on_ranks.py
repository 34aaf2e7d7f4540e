"""What must be equal on all ranks, compared by numbers that they sum in each step.

    options    of the optimizer's groups: rates, betas, ...; autocast            in each step
    facts      of a loop: steps of its optimizers, sw.clip_grad_norm, ...        in each step
    flags      training of modules, requires_grad of parameters                  in each step
    doubts     what may be no mistake (doubts.py); a warning                       in each step
    batch      along cp, tp and pp: shapes, and the sum of the bits              in each step
    weights    that several data ranks hold: all of them under ddp, the          every `every` steps
               shards of hybrid sharding, what zero1 and zero2 keep gathered,
               experts of several ranks; fp32 masters of 16-bit weights
    states     of the optimizer, for such weights                                the same
    reruns     the loss and gradients of a microbatch that two ranks computed    rerun.py

Of n ranks that hold the same, rank r contributes a multiple of its hash h:

    (n - 1) h(0)  on the first,   - h(r)  on each other;   the sum is 0 if all hashes are equal

The sums are of whole numbers in doubles: they are exact. Only if the sum is not 0, the ranks
exchange names and values for the error, which names the rank whose bits differ from most.

Tensor ranks and stages of a pipeline have the same options and the same batch too. Along their axes
a second such sum is in the message with which they agree on the loss or the norm:

    whole part    of the options and the batch of these ranks
    fraction      how many of them have a sum over the data ranks that is not 0, so that all ranks
                  know if any two differ
"""

import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.agreement.checksum import (
    Options,
    Reruns,
    Table,
    batch_hash,
    batch_values,
    bits_sum,
    numbers_of,
    odd_values,
    other_batches,
    read,
    require_reruns,
    text_hash,
)
from shardwise.agreement.doubts import KINDS, Doubts
from shardwise.comm.move import all_gather, begin_sum, gather_object
from shardwise.comm.tiers.host_memory import doubles_on
from shardwise.comm.world import Axis
from shardwise.core.errors import InputError, bad
from shardwise.core.mesh import PIPELINE
from shardwise.core.tools.arguments import rank_names
from shardwise.flat.flat_parameter import Flat, State

#: Steps between two comparisons of weights, unless an engine says otherwise.
EVERY = 100
#: Hashes along other axes than the data's are below it, and the factor of the second such axis.
_HASHES_ON_OTHERS, _FACTOR = 65521, 8191
#: The axis of the data ranks that hold the same experts.
_OF_EXPERTS: Final = "edp"
#: The name of the fact that counts the steps of a loop's optimizers, by their class.
STEPS: Final = "the optimizer steps since the last backward pass"


class _Copy(NamedTuple):
    """This rank's copy of a flat parameter, as the `rank`-th of `ranks` data ranks that hold it.
    `part` tells it from the parts of the same parameters that other ranks hold. `of_parameters`
    gives names and tensors; `whole` the same as few tensors.
    """

    part: tuple[int, ...]
    rank: int
    ranks: int
    whole: Callable[[], list[Tensor]]
    of_parameters: Callable[[], Iterable[tuple[str, Tensor]]]


def _weights(flat: Flat) -> list[Tensor]:
    """What data ranks hold of it now; between two gathers of full parameters only the shard."""
    if flat.split and not flat.reshards:
        return [flat.full] if flat.state is State.UNSHARDED else []
    return [flat.shard]


def named_parts(what: str, flat: Flat, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The name of each parameter, and its values in a flat tensor."""
    pieces = len(values) < flat.plan.padded
    parts = range(len(flat.params)) if pieces else ()
    every = [flat.views.part(i, values) for i in parts] or flat.views.every(values)
    yield from zip((f"{what}{name}" for name in flat.names), every, strict=True)


class SameOnRanks:
    """What this rank has, and what the ranks find when it is not what the others have.

    options    by name, set before each step; None: this rank has nothing to update. An option that
               a rank does not have is no difference: groups may be made by the shapes of pieces
    facts      by name, of this step; a fact that a rank does not have is a difference
    modules    whose training flags data ranks have in common, as requires_grad of parameters
    every      steps between two comparisons of weights; 0: none
    step       the number of the step, from 1
    reruns     of this step, if it has one
    batch      a hash of the batch of this step, below `hashes`; `unchecked` is the batch itself
    floats     whether the hash is also of numbers that are not whole
    others     axes besides the data's, whose ranks have the same options and the same batch
    batches    axes of the data ranks whose ranks have the same batch (cp)
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        flats: Sequence[Flat],
        hashes: int,
        device: torch.device,
        modules: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.axes, self.hashes, self.device, self.every = axes, hashes, device, EVERY
        self.others: Sequence[Axis] = ()
        self.batches: Sequence[Axis] = ()
        self.batch: int | Tensor = 0
        self.unchecked: Any = None
        self.floats = True
        self.step = 0
        self.reruns: Reruns | None = None
        self.options: Options | None = {}
        self.facts: Options = {}
        self.sent: tuple[Options, Options] | None = None  # those that the ranks compare
        self.hash = 0  # of them
        self.weighs = False  # whether they compare weights and hooks too
        self.compared: dict[str, Options] = {}  # the doubts of this step
        self.on_tensor = 0  # a hash of what tensor ranks compare with the weights
        experts = any(_OF_EXPERTS in (f.shard_axis.name, f.replicate_axis.name) for f in flats)
        self.modules = {} if experts else dict(modules or {})  # else those of other ranks differ
        self.doubts = Doubts(() if experts else flats, self.modules)
        self.params = self.doubts.params
        self.copies = [
            copy
            for flat in flats
            for copy in self._copies(
                flat,
                flat.split and flat.reshards,
                partial(_weights, flat),
                lambda flat=flat: chain.from_iterable(
                    named_parts("", flat, values) for values in _weights(flat)
                ),
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

    def add(self, tensors: Mapping[Flat, Callable[[], Iterable[tuple[str, Tensor]]]]) -> None:
        """Compare these too, and name them first: masters of 16-bit weights, optimizer states. If
        weights differ, states stay equal, since ranks sum their gradients. States that differ make
        weights differ in the next update.
        """
        self.copies = [
            copy
            for flat, named in tensors.items()
            for copy in self._copies(
                flat, flat.split, lambda named=named: [x for _, x in named()], named
            )
        ] + self.copies

    def begin(self, step: int, options: Options, writes: bool) -> None:
        """Step number `step`, from 1, begins with these options."""
        self.step, self.options = step, options
        self.forget_batch()
        self.doubts.state_writes = writes
        if any(axis.size > 1 for axis in self.others):  # a stage has some of the modules
            staged = any(axis.name == PIPELINE and axis.size > 1 for axis in self.others)
            names = {""} & self.modules.keys() if staged else self.modules
            off = [name or "the model" for name in names if not self.modules[name].training]
            self.options = self.options | {"the modules in eval mode": off}
        self.note_autocast()

    def see_batch(self, batch: Any) -> None:
        """This step's batch, whose hash ranks sum; if it differs, they compare it in full."""
        self.batch = batch_hash(batch, self.hashes, self.device, floats=self.floats)
        self.unchecked = batch

    def forget_batch(self) -> None:
        self.batch, self.unchecked = 0, None

    def require_batch(self, batch: Any) -> None:
        """Raise InputError on every rank of an axis whose ranks have different batches."""
        for axis in (axis for axis in (*self.others, *self.batches) if axis.size > 1):
            with axis.ledger.phase("check"):
                others = other_batches(all_gather(batch_values(batch, self.device), axis))
            if others:
                raise bad(
                    f"a batch on {rank_names(others)} of the {axis.name} axis that differs from "
                    "that on rank 0",
                    f"the same batch on all ranks of a {axis.name} axis",
                    "DistributedSampler(dataset, engine.data_ranks, engine.data_rank)",
                )

    def note_autocast(self) -> None:
        """A forward pass begins, under the autocast of the program."""
        kind = self.device.type
        own = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"
        if self.options is not None:
            self.options = self.options | {"torch.autocast in the forward pass": own}

    def stepped(self, kind: str, options: Options) -> None:
        """An optimizer of the class `kind` is about to step with these options of its groups."""
        self.options = {**(self.options or {}), **options}
        steps = self.facts.get(STEPS, {})
        self.facts[STEPS] = {**steps, kind: steps.get(kind, 0) + 1}

    def difference(self, step: int, *, modes: bool = True) -> int | Tensor:
        """This rank's contribution in step `step`, from 0; a double on the device with tensors."""
        self.sent = None if self.options is None else (self.options, self.facts)
        self.options, self.facts = None if self.options is None else {}, {}
        self.weighs = self.every > 0 and step % self.every == 0
        self.hash = self._hash(repr(self.sent and [sorted(each.items()) for each in self.sent]))
        tensor = self.weighs and self.tensor_ranks > 1
        compares = self.data_ranks > 1 or tensor
        self.compared = self.doubts.found(all_kinds=self.weighs) if compares else {}
        shared = self.compared.get("hooks"), self._flags() if tensor and modes else b""
        self.on_tensor = self._hash(repr(shared)) * tensor
        if not any(axis.transport.answered for axis in self.axes):
            return 0  # alone, or in a traced world, whose ranks are all this one
        parts = [self.hash, self._hash(repr(self.compared))]
        if modes and self.data_ranks > 1:
            parts.append(self._hash(repr(self._flags())))
        own = _share(self.data_rank(), self.data_ranks) * sum(parts)
        for axis in self.batches:
            own = own + _share(axis.rank, axis.size) * self.batch
        if self.reruns is not None:
            own = own + self.reruns.difference(self.hashes, self.device)
        sums = defaultdict[tuple[int, int], list[Tensor]](list)
        for copy in self.copies if self.weighs else ():
            sums[copy.rank, copy.ranks] += [bits_sum(x).to(self.device) for x in copy.whole()]
        for place, bits in sums.items():
            total = sum(bits, start=torch.zeros((), dtype=torch.int64, device=self.device))
            own = own + _share(*place) * total.remainder(self.hashes).double()
        return own

    def _hash(self, text: str) -> int:
        return text_hash(text) % self.hashes

    def _flags(self) -> bytes:
        training = [m.training for m in self.modules.values()]
        return bytes([*training, *(p.requires_grad for _, p in self.params)])

    @property
    def tensor_ranks(self) -> int:
        return math.prod(axis.size for axis in self.others if axis.name != PIPELINE)

    @property
    def data_ranks(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def warn_of_few(self, found: int, microbatches: int, ranks: int) -> None:
        """Print that this rank has few rows, as so many `ranks` have; if all of them, once."""
        copies = any(axis.rank for axis in (*self.others, *self.batches))
        rank = self.data_rank()
        if found and not copies and (ranks < self.data_ranks or not rank):
            print(
                f"shardwise: data rank {rank} has {found} rows, fewer than its {microbatches} "
                "microbatches, of which some are empty. "
                f"Write accumulate:{found}, or pass more rows.",
                file=sys.stderr,
            )

    def data_rank(self, axis: Axis | None = None, ahead: int = 0) -> int:
        """The place of this rank among the data ranks, or of one `ahead` of it on an axis."""
        shard, replicate = ((each.rank + ahead * (each is axis)) % each.size for each in self.axes)
        return replicate * self.axes[0].size + shard

    def difference_on_others(self, *, batch: bool = True) -> int | Tensor:
        """This rank's contribution to the sum over the other axes: of the options and the batch.
        Each axis has its own factor, so that contributions on two axes do not cancel.
        """
        own: int | Tensor = 0
        for number, axis in enumerate(self.others):
            of_modules = 0 if axis.name == PIPELINE else self.on_tensor
            value = (self.hash + of_modules + (self.batch if batch else 0)) % _HASHES_ON_OTHERS
            share = _share(axis.rank, axis.size) * axis.transport.answered
            own = own + _FACTOR**number * share * value
        return own

    def require(self, *, on_all: bool = True) -> None:
        """A sum is not 0: the ranks exchange what they have. Without `on_all` this rank's tp and pp
        axes alone know it. Warns if numbers differ by rounding.
        """
        if self.unchecked is not None:
            self.require_batch(self.unchecked)
            self.floats = False  # batches that each rank makes differ by rounding
            own = doubles_on([0], self.device) + self.difference_on_others(batch=False)
            for axis in () if on_all else self.others:
                own = begin_sum(own, axis).wait()
            if not (on_all or own.item()):
                return
        weights = self._values() if self.weighs else {}
        modes = {
            f"training of {name or 'the model'}": m.training for name, m in self.modules.items()
        }
        modes |= {f"requires_grad of {name}": p.requires_grad for name, p in self.params}
        reruns = {} if self.reruns is None else self.reruns.values()
        every: list[Any] = [(self.sent, modes, weights, reruns, self.compared)]
        for axis in (*self.axes, *self.others):
            parts = gather_object(every, axis, self.device)
            every = [each for part in parts for each in part]
        told = self.unchecked is not None or not self.weighs
        have = [(rank, each[0]) for rank, each in enumerate(every) if each[0] is not None]
        self._require_options([(rank, facts) for rank, (_, facts) in have], every=True)
        self._require_options([(rank, options) for rank, (options, _) in have])
        stage = self.data_ranks * self.tensor_ranks  # so many ranks have the same modules
        for start in range(0, len(every), stage):
            ranks = [*enumerate(every)][start:][:stage]
            self._require_options([(rank, modes) for rank, (_, modes, *_) in ranks])
            told |= self._doubts("hooks", [(rank, own) for rank, (*_, own) in ranks])
        for start in range(0, len(every), self.data_ranks):
            data_ranks = every[start:][: self.data_ranks]
            reruns = [each for *_, each, _ in data_ranks]
            require_reruns(reruns, self.step, lambda rank, start=start: self._place(start + rank))
            told |= self._require_weights(start, [each for _, _, each, *_ in data_ranks])
            for kind in (kind for kind in KINDS if kind != "hooks"):
                told |= self._doubts(kind, [(start + k, x[-1]) for k, x in enumerate(data_ranks)])
        if not told:
            warnings.warn(
                f"Weights differed between data ranks in step {self.step}; its update has replaced "
                "them by what each rank updates, which one of them may have changed alone. "
                "Continue from a checkpoint before it.",
                stacklevel=2,
            )

    def _doubts(self, kind: str, have: Sequence[tuple[int, dict[str, Options]]]) -> bool:
        """Warn if ranks differ in this kind; returns whether they do."""
        try:
            self._require_options([(rank, own.get(kind, {})) for rank, own in have], every=True)
        except InputError as error:
            self.doubts.warn(kind, error)
            return True
        return False

    def _require_options(self, have: Sequence[tuple[int, Options]], *, every: bool = False) -> None:
        """Raise InputError for a value that differs; with `every`, for one that a rank lacks."""
        for rank, options in have:
            place, first = have[0]
            for name in sorted(
                {*first, *options}, key=lambda name: (name[:3] != "lr ", name != STEPS, name)
            ):
                both = name in options and name in first
                if (both or every) and options.get(name) != first.get(name):
                    raise _other_option(
                        name,
                        [self._place(rank), self._place(place)],
                        [options.get(name, "none"), first.get(name, "none")],
                    )

    def _place(self, rank: int) -> str:
        number, own = divmod(rank, self.data_ranks)
        several = [("data", own)] if self.data_ranks > 1 else []
        for axis in self.others:
            number, own = divmod(number, axis.size)
            several += [(axis.name, own)] if axis.size > 1 else []
        return ", ".join(f"{name} rank {own}" for name, own in several)

    def _require_weights(self, start: int, every: Sequence[Table]) -> bool:
        """Compare all tensors of the data ranks from the rank `start` on; returns whether any
        differ.
        """
        different = odd_values(every)
        wrong = [(k, *at) for k, *at in different if every[at[0]][k].differs(every[at[1]][k])]
        for (name, part), rank, usual in (wrong or different)[:1]:
            place, first = (self._place(start + each) for each in (rank, usual))
            if not wrong:
                warnings.warn(
                    f"The weights {name} on {place} differ from those on {first} by rounding, as "
                    "on hosts with other processors. A checkpoint has those of one of them.",
                    stacklevel=2,
                )
                continue
            others = len({key[0] for key, *_ in wrong}) - 1
            more = f"; {others} other tensor{'s differ' if others > 1 else ' differs'}"
            norm, expected = (every[each][name, part].norm for each in (rank, usual))
            raise bad(
                f"{name} on {place}, whose norm is {norm:.9g}; on "
                f"{first} its norm is {expected:.9g}{more * bool(others)}",
                "weights and optimizer states that are equal on all data ranks",
                "the same change on every rank, or sw.load on every rank. If no code changed it, "
                "the memory of the rank that is named first is damaged",
            )
        return bool(different)

    def _values(self) -> Table:
        return {
            (name, copy.part): read(numbers_of(x))
            for copy in self.copies
            for name, x in copy.of_parameters()
        }


def _share(rank: int, ranks: int) -> int:
    return -1 if rank else ranks - 1


def _other_option(name: str, places: Sequence[str], values: Sequence[object]) -> Exception:
    instead = "the same line on every rank, without a condition on the rank"
    if name == STEPS:
        instead = (
            "a step on every rank, or on none; a gradient scaler that skips on all is "
            "ShardedGradScaler of torch.distributed.fsdp.sharded_grad_scaler"
        )
    return bad(
        f"{name} on {places[0]}: {values[0]!r}; on {places[1]}: {values[1]!r}",
        "the same model, optimizer and options, in the same steps, on all ranks",
        instead,
    )
