"""this file is what ranks are to have alike, and how they find out that they have not.

    before anything is laid out    plan, model, table, optimizer, options     all ranks
    before the first step          the batch                                  those of one data rank
    in the first step(s)           the loss, and the gradients of             those of a tensor axis
                                   parameters that each of them holds whole
    every `check_every` steps      the batch                                  those of one data rank
                                   the loss; a sum and the norm of gradients  those of a tensor axis

Ranks of a tensor axis compute one step together.  What they do not cut each of them computes by
itself, the same on all: a difference there is a fault that no shape gives away, for a parameter
used on a part of the features trains on a part of its gradient.  So each tells a few numbers of
it: sums with fixed weights, which differ if the tensors do.  A gradient of zeros says nothing (of
an adapter behind one that begins at zero): they compare again, a few times, while there is one.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.comm.move import all_gather
from shardwise.comm.world import Axis, World
from shardwise.core.errors import bad
from shardwise.engine.norm import squared_norm
from shardwise.engine.tensor_layout import Tensors
from shardwise.parallel.data.flat_parameter import Flat

#: Weights of a sum, one after the other and again: a prime number of them, so that no shape fits.
WEIGHTS = 509
#: Of whole numbers, with another factor each: any large prime.
PRIME = 2_305_843_009_213_693_951
#: By how much batches may differ that ranks have made each for itself, of their size.
ROUNDED = 1e-6
#: By how much what is alike may differ, of its size: sums in another order, if that.
CLOSE, CLOSE_IN_16_BITS = 1e-3, 3e-2
#: What is smaller than so much of all gradients together is rounding.
NOTHING = 1e-5
#: In so many steps gradients are compared while some are zero; those with infinite ones besides.
TIMES = 3
#: After so many steps they are compared again, by a few numbers, unless the user says otherwise.
EVERY = 100
#: Numbers that ranks tell of what they are given.
PARTS = 16

U = TypeVar("U")


# --- what is given ---------------------------------------------------------------------------


def given(world: World, parts: Mapping[str, object]) -> None:
    """Raise InputError on every rank where ranks were given another part, by name, than rank 0.

    Called by all ranks.  Of a function only that it is one is compared; not where objects lie.
    """
    if world.size == 1:
        return
    names = ["the call", *parts]
    own = [_hash(repr(names)), *(_hash(_printed(part)) for part in parts.values())]
    own += [0] * (PARTS - len(own))  # as many in every call, also of another kind
    everyone = all_gather(torch.tensor(own, device=world.device), world.everyone)
    told = torch.stack(everyone).tolist()
    for number, name in enumerate(names):
        others = [rank for rank in range(world.size) if told[rank][number] != told[0][number]]
        if others:
            raise bad(
                f"{name} of {_ranks(others)} that is not as on rank 0",
                "the same model and the same arguments on all ranks, which train it together",
                "the same call on every rank; what is to differ between them is the data",
            )


def described(model: nn.Module) -> list[tuple[str, tuple[int, ...], torch.dtype, bool]]:
    """What of a model has to be the same on all ranks before its weights are."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors]


def _printed(part: object) -> str:
    if callable(part) and not isinstance(part, type):
        return "a function"
    return re.sub(r" at 0x[0-9a-f]+|, device='[^']*'", "", repr(part))


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


# --- what is made ----------------------------------------------------------------------------


class Alike:
    """What is compared by ranks that compute a step together: along these axes.

    `met`: whether the last step compared batches; `compared`: and which gradients (traffic.py).
    """

    def __init__(
        self, tensors: Tensors, pipeline: Axis | None, device: torch.device, every: int = EVERY
    ) -> None:
        self.axis, self.device, self.tensors = tensors.axis, device, tensors
        self.axes = [axis for axis in (tensors.axis, pipeline) if axis and axis.size > 1]
        self.due, self.times = self.axis.size > 1, 0  # whether gradients are still to be compared
        self.every, self.met, self.compared = every, False, ""

    def begin(self, step: int, batch: Any) -> None:
        """What is compared in an engine's step of that number, from 0 on; the batch at once."""
        again = self.every > 0 and step % self.every == 0
        self.met = again or not step
        self.compared = "each" if self.due else "sums" if again and self.axis.size > 1 else ""
        if self.met:
            self._require_batch(batch)

    def _require_batch(self, batch: Any) -> None:
        """Raise InputError on every rank of an axis whose ranks do not have the same batch."""
        for axis in self.axes:
            with axis.ledger.phase("check"):
                told = torch.stack(all_gather(_mark(batch, self.device), axis))
            marks = list(told.cpu())
            others = [rank for rank, mark in enumerate(marks) if not _same(mark, marks[0])]
            if others:
                raise bad(
                    f"a batch of {_ranks(others)} of the {axis.name} axis that is not as on rank 0",
                    f"one batch on all ranks of a {axis.name} axis, which compute it together",
                    "a sampler over engine.data_ranks ranks, of which this is engine.data_rank",
                )

    def settled(self, arriving: Iterator[U], loss: Tensor, flats: Sequence[Flat]) -> Iterator[U]:
        """`arriving`, in a step that compares when the gradients of `flats` have come and agree.

        Raises:
            InputError: the loss or a gradient is not alike, on every rank that finds it so.
        """
        if not self.compared:
            return arriving
        arrived = list(arriving)
        with self.axis.ledger.phase("check"):
            if self.compared == "each" or not self._sums_agree(loss, flats):
                self._require(loss, flats)
        return iter(arrived)

    def _sums_agree(self, loss: Tensor, flats: Sequence[Flat]) -> bool:
        """Whether three numbers do: the loss, the sum of all gradients, and their norm."""
        sums, sizes = self._gradients(flats)[1].chunk(2)
        own = torch.stack([loss.detach().to(sums), sums.sum(), sizes.norm()])
        losses, total, norm = torch.stack(all_gather(own, self.axis)).cpu().t()
        close, size = self._tolerance(flats), norm.nan_to_num().max()
        same = _close(losses, losses.abs().max() + CLOSE, close)
        return same and _close(total, size, close) and _close(norm, size, close)

    def _tolerance(self, flats: Sequence[Flat]) -> float:
        return CLOSE if all(_wide(flat) for flat in flats) else CLOSE_IN_16_BITS

    def _require(self, loss: Tensor, flats: Sequence[Flat]) -> None:
        names, gradients = self._gradients(flats)
        own = torch.cat([loss.detach().to(gradients).view(1), gradients])
        told = torch.stack(all_gather(own, self.axis)).cpu()
        losses, (sums, sizes) = told[:, 0], told[:, 1:].chunk(2, dim=1)
        close = self._tolerance(flats)
        if not _close(losses, losses.abs().max() + CLOSE, close):  # one of zero is of rounding
            raise self._other_losses(losses.tolist())
        everything = NOTHING * sizes.nan_to_num().norm(dim=1).max()
        for name, of_sum, size in zip(names, sums.t(), sizes.t(), strict=True):
            room = size.nan_to_num().max() + everything
            if not (_close(of_sum, room, close) and _close(size, room, close)):
                raise self._other_gradients(name)
        finite = bool(sizes.isfinite().all())
        self.times += finite
        self.due = not finite or (self.times < TIMES and not bool(sizes.any(0).all()))

    def _gradients(self, flats: Sequence[Flat]) -> tuple[list[str], Tensor]:
        """Names, and a sum with weights of each gradient, then a size of each."""
        none = torch.zeros((), dtype=torch.float64, device=self.device)
        names, sums, sizes = [], [], []
        for flat in (flat for flat in flats if flat.trained):
            for name, (low, high) in zip(flat.names, flat.pieces, strict=True):
                if self.tensors.of(name).cut is None:
                    piece = None if flat.gshard is None else flat.gshard[low:high]
                    names.append(name)
                    sums.append(none if piece is None else _sum(piece))
                    sizes.append(none if piece is None else squared_norm(piece).sqrt())
        return names, torch.stack([*sums, *sizes]) if names else none.new_zeros(0)

    def _other_losses(self, losses: Sequence[float]) -> Exception:
        told = ", ".join(f"{loss:.6g}" for loss in losses)
        return bad(
            f"a loss that differs between the ranks of the {self.axis.name} axis: {told}",
            "a forward and a loss that use what the table cuts only as it says: a cut weight by "
            "calling its module, cut features between the layers by columns and by rows",
            'an entry that makes the result whole ("colwise_gather_output", "sequence:join"), and '
            "the same random numbers on all ranks",
        )

    def _other_gradients(self, name: str) -> Exception:
        module = name.rpartition(".")[0] or name
        return bad(
            f"the gradient of {name}, which differs between the ranks of the {self.axis.name} axis "
            "though each holds all of it: each has used it on other features or positions",
            "parameters that all these ranks use alike, with the same random numbers, or of a "
            "module that the table names and that holds no other modules",
            f'in the table "{module}": "replicated" between layers cut by columns and by rows, or '
            f'"{module}": "sequence" on the stream under sp',
        )


def _close(values: Tensor, size: Tensor, close: float) -> bool:
    """Whether they differ by no more than so much of `size`; what is no number is not compared."""
    found = values.nan_to_num(0.0, 0.0, 0.0)
    return bool(found.max() - found.min() <= close * size.nan_to_num(math.inf))


def _wide(flat: Flat) -> bool:
    return flat.gshard is None or flat.gshard.dtype in (torch.float32, torch.float64)


def _mark(batch: Any, device: torch.device) -> Tensor:
    """Three numbers that tell batches apart, in whatever order: the last is the second's size.

    The first is exact, of shapes and of what is whole numbers; the second of what may be rounded.
    """
    exact = torch.zeros((), dtype=torch.int64, device=device)
    sums, sizes = [exact.double()], [exact.double()]
    for x in (x for x in tree_leaves(batch) if type(x) is Tensor and x.layout == torch.strided):
        exact = exact + _hash(f"{x.shape}")
        with suppress(RuntimeError):  # quantised, float8: no sum is known
            if x.is_floating_point() or x.is_complex():
                folded = _folded(x.detach(), torch.float64)
                sums.append(_weighed(folded).to(device))
                sizes.append(folded.norm().to(device))
            else:
                weights = torch.arange(1, WEIGHTS + 1, device=x.device) * PRIME
                exact = exact + (_folded(x, torch.int64) * weights).sum().to(device)
    return torch.stack(
        [(exact % 2**52).double(), torch.stack(sums).sum(), torch.stack(sizes).sum()]
    )


def _same(mark: Tensor, other: Tensor) -> bool:
    """Whether two batches with these marks are the same."""
    (exact, sums, sizes) = torch.stack([mark, other], dim=1)
    return bool(exact[0] == exact[1]) and _close(sums, sizes.max(), ROUNDED)


def _sum(x: Tensor) -> Tensor:
    """The sum of `x` with fixed weights, in double, without dims."""
    return _weighed(_folded(x, torch.float64))


def _weighed(folded: Tensor) -> Tensor:
    weights = torch.arange(WEIGHTS, dtype=torch.float64, device=folded.device).cos()
    return folded.dot(weights)


def _folded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum [WEIGHTS] of all rows of so many elements that `x` has, end to end."""
    flat = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)
    rows = flat[: len(flat) - len(flat) % WEIGHTS].view(-1, WEIGHTS)
    folded = rows.sum(0, dtype=dtype)
    rest = flat[rows.numel() :]
    folded[: len(rest)] += rest
    return folded.nan_to_num(1, 2, 3)  # masks of -inf beside other values
