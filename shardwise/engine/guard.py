"""The guard: a step whose loss or gradient is not finite updates nothing, on any rank.

    backward     as the sum of a unit's gradients begins, each rank adds up those that it has made:
                 one pass over them, no message; one that is not finite makes this number NaN
    facts        the ranks exchange their losses anyway; a rank whose number is NaN sends NaN
                 instead of its loss, so nothing more is sent; along a tensor axis, whose ranks
                 have one loss and different gradients, one double more is sent
    update       not before the facts are known, however early a unit's sum arrives

If the norm of all gradients is known before the update (clipping, fp16), it decides, and nothing
more is sent.  A schedule that updates by itself checks the sums of each update, and leaves out an
update that is not finite; its ranks raise together at the end of the step.

Finite numbers whose sum overflows count as not finite.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from shardwise.comm.move import all_gather, begin_sum
from shardwise.comm.world import Axis, World
from shardwise.core.errors import NonFiniteError
from shardwise.parallel.data.flat_parameter import Flat

#: So many updates left out in a row are an error, under fp16 and where steps may be skipped.
MOST_SKIPS: Final = 100
#: Bytes of a parameter's name that ranks tell one another.
NAME_BYTES: Final = 256


class Guard:
    """What one rank knows of whether a step is finite.

    names    the parameters of the whole model, in order
    axis     that of tensor parallelism
    by_norm  whether the norm of all gradients is known before the update
    skip     whether a step that is not finite is left out instead of ending the run
    """

    def __init__(
        self, world: World, axis: Axis, names: Sequence[str], *, by_norm: bool, skip: bool
    ) -> None:
        self.world, self.axis, self.by_norm, self.skip = world, axis, by_norm, skip
        self.order = {name: place for place, name in enumerate(names)}
        self.made: list[Tensor] = []  # in this step: 0 for gradients that are finite, else NaN
        self.first = ""  # parameter whose gradient was not finite in an update that was left out
        self.skips = 0  # in a row

    def begin(self) -> None:
        """A step begins, or has ended: nothing is kept of one."""
        self.made.clear()
        self.first = ""

    def passed(self) -> None:
        """The step has had its update."""
        self.skips = 0
        self.begin()

    @torch.no_grad()
    def see(self, flat: Flat) -> None:
        """Take note of the gradients this rank has made, which are about to be summed."""
        if flat.grad is None:  # of a group that this rank's stages do not use
            return
        views = [v for v, filled in zip(flat.grad_views, flat.filled, strict=True) if filled]
        for part in [flat.grad] if len(views) == len(flat.params) else views:
            self.made.append(0 * _sum(part))

    def reported_loss(self, summed: Tensor) -> Tensor:
        """The loss (times tokens) that this rank reports: NaN if its gradients are not finite."""
        return summed if self.by_norm or not self.made else summed + torch.stack(self.made).sum()

    def over_tensors(self, x: Tensor) -> Tensor:
        """The loss [1], NaN if any rank of the tensor axis reported NaN."""
        if self.by_norm or self.axis.size == 1:
            return x
        return x + begin_sum(x * 0, self.axis).wait()

    @torch.no_grad()
    def spoils(self, flats: Sequence[Flat]) -> bool:
        """Whether an update of a schedule's own would be made from what is not finite."""
        sums = [_sum(flat.gshard) for flat in flats if flat.gshard is not None]
        if not sums or math.isfinite(torch.stack(sums).sum().item()):
            return False
        self.made.append(torch.full_like(sums[0], math.nan))
        self.first = self.first or _first(flats)
        return True

    def record_skip(
        self,
        step: int,
        summed: Tensor,
        flats: Sequence[Flat],
        norm: float | None,
        expected: bool,
    ) -> NonFiniteError | None:
        """Note that the step has no update: what to raise, on every rank, if anything.

        `norm` is that of the gradients where it is what is not finite; `expected` whether such
        steps are no error, as under fp16, whose loss scale they lower. Called by all ranks.
        """
        error = self._found(step, summed, flats, norm, expected)
        self.begin()
        return error

    def _found(
        self,
        step: int,
        summed: Tensor,
        flats: Sequence[Flat],
        norm: float | None,
        expected: bool,
    ) -> NonFiniteError | None:
        self.skips += 1
        if self.skips >= MOST_SKIPS:
            return NonFiniteError(
                f"Step {step}: {self.skips} steps in a row had no finite gradient and were left "
                "out: the weights have not changed since. Go on from the last checkpoint with a "
                "lower learning rate, or in bf16 or fp32."
            )
        return None if self.skip or expected else self._error(step, summed, flats, norm)

    def _error(
        self, step: int, summed: Tensor, flats: Sequence[Flat], norm: float | None
    ) -> NonFiniteError:
        first = self.first or _first(flats)
        name = first.encode()[:NAME_BYTES]
        own = [
            int(not math.isfinite(summed.item())),
            int(bool(self.made) and not bool(torch.stack(self.made).isfinite().all())),
            self.order.get(first, len(self.order)),
            *name.ljust(NAME_BYTES, b"\0"),
        ]
        told = [
            each.tolist()
            for each in all_gather(torch.tensor(own, device=self.world.device), self.world.everyone)
        ]
        losses = [rank for rank, each in enumerate(told) if each[0]]
        makers = losses or [rank for rank, each in enumerate(told) if each[1]]
        what = "the gradient is" if norm is None else f"the gradient's norm is {norm},"
        what = "the loss is not finite" if losses else f"{what} not finite"
        where = f"on rank {', '.join(map(str, makers))}" if makers else "as a sum over the ranks"
        named = bytes(min(told, key=lambda each: each[2])[3:]).rstrip(b"\0").decode(errors="ignore")
        found = f"; the first parameter without a finite gradient is {named}" if named else ""
        return NonFiniteError(f"Step {step}: {what}, {where}{found}. It was not used in any update")


def _sum(x: Tensor) -> Tensor:
    """The sum, a double without dims."""
    return x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).double()


def _first(flats: Sequence[Flat]) -> str:
    """The first parameter of which this rank has a gradient that is not finite; "" for none."""
    return first_not_finite((flat, flat.gshard) for flat in flats if flat.gshard is not None)


@torch.no_grad()
def first_not_finite(blocks: Iterable[tuple[Flat, Tensor]]) -> str:
    """The name of the first parameter with a value that is not finite; "" if all are finite.

    Each flat group comes with this rank's block of it: of weights or of gradients.
    """
    for flat, values in blocks:
        for name, (low, high) in zip(flat.names, flat.pieces, strict=True):
            if not bool(values[low:high].isfinite().all()):
                return name
    return ""
