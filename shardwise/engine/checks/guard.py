"""The guard against NaN: a step with a non-finite loss or gradient updates no weight on any rank.

    backward     before a unit's gradients are reduced, each rank sums its local ones: one pass over
                 memory, no message; a non-finite gradient makes the sum NaN
    consensus    the ranks exchange their losses anyway; a rank whose sum is NaN sends NaN instead
                 of its loss, so this costs no message; a tp axis, whose ranks share a loss but not
                 gradients, exchanges one double more
    update       waits for the consensus, however early a unit's gradients arrive

If the norm of all gradients is known before the update (clipping, fp16), the norm decides.  A
schedule with asynchronous updates checks the reduced gradients of each update.  If those of one
rank are not finite, all data and tensor ranks of the stage skip the update, and all ranks raise at
the end of the step.

Finite numbers whose sum overflows count as not finite.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from shardwise.comm.move import all_gather_object, begin_sum
from shardwise.comm.tiers.host_memory import HostNumbers
from shardwise.comm.world import Axis, World
from shardwise.core.errors import NonFiniteError
from shardwise.flat.flat_parameter import Flat

#: This many skipped updates in a row are an error, even where steps may be skipped.
MOST_SKIPS: Final = 100


class Guard:
    """Whether the current step is finite, as far as this rank knows.

    names    the parameters of the whole model, in order
    axis     the tp axis
    by_norm  whether the norm of all gradients is known before the update
    skip     whether to skip a non-finite step instead of raising
    """

    def __init__(
        self, world: World, axis: Axis, names: Sequence[str], *, by_norm: bool, skip: bool
    ) -> None:
        self.world, self.axis, self.by_norm, self.skip = world, axis, by_norm, skip
        self.order = {name: place for place, name in enumerate(names)}
        self.made: list[Tensor] = []  # for each unit of this step: not finite if a gradient is not
        self.first = ""  # the first parameter with a non-finite gradient in a skipped update
        self.skips = 0  # skipped updates in a row

    def begin(self) -> None:
        self.made.clear()
        self.first = ""

    def passed(self) -> None:
        self.skips = 0
        self.begin()

    @torch.no_grad()
    def see(self, flat: Flat) -> None:
        """Check this rank's own gradients of a unit, before they are reduced."""
        if flat.grads.grad is None:  # this rank's stages do not use the unit
            return
        views = [
            v for v, filled in zip(flat.grads.grad_views, flat.grads.filled, strict=True) if filled
        ]
        for part in [flat.grads.grad] if len(views) == len(flat.params) else views:
            self.made.append(_sum(part))

    def reported_loss(self, summed: Tensor) -> Tensor:
        """The loss (times tokens) to exchange: NaN if this rank's gradients are not finite."""
        return (
            summed
            if self.by_norm or not self.made
            else summed + 0 * torch.stack(self.made).sum().to(summed)
        )

    def over_tensors(self, loss: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        """The loss [1], NaN if any rank of the tensor axis reported NaN, and the sum of `number`.
        One number does for both; it is NaN if the loss is.
        """
        if self.by_norm or self.axis.size == 1:
            return loss, number
        number = begin_sum(loss * 0 + number, self.axis).wait()
        return loss + number * 0, number

    @torch.no_grad()
    def not_finite(self, flats: Sequence[Flat]) -> Tensor:
        """1 if a reduced gradient of an asynchronous update is not finite here, else 0; [1]."""
        found = torch.zeros(1, dtype=torch.float64, device=self.world.device)
        for gradient in (flat.grads.gshard for flat in flats):
            found += 0 if gradient is None else 0 * _sum(gradient).to(found)
        return found.isnan().to(found)

    def spoil(self, bad_ranks: Tensor, flats: Sequence[Flat]) -> None:
        """Record that an asynchronous update was skipped, if `bad_ranks` [1] is not 0."""
        self.made.append(torch.where(bad_ranks > 0, math.nan, 0.0).squeeze())
        numbers = HostNumbers(bad_ranks)
        if numbers.ready and numbers.read()[0]:
            self.first = self.first or _first(flats)

    def record_skip(
        self, step: int, find: Callable[[], NonFiniteError], *, expected: bool
    ) -> NonFiniteError | None:
        """Record that the step was not updated.  Returns the error to raise on every rank, if any.
        `find` makes the error; `expected`: such steps are normal (fp16, where they lower the loss
        scale). All ranks must call it.
        """
        self.skips += 1
        error = None
        if self.skips >= MOST_SKIPS:
            error = NonFiniteError(
                f"Step {step}: {self.skips} steps in a row were skipped: their gradients were not "
                "finite, or far above those before (skip:N), so the weights have not changed. "
                "Resume from the last checkpoint with a lower learning rate, or use bf16 or fp32."
            )
        elif not (self.skip or expected):
            error = find()
        self.begin()
        return error

    def error(
        self, step: int, summed: Tensor, flats: Sequence[Flat], norm: float | None
    ) -> NonFiniteError:
        """The error that names what is not finite, on which ranks; `norm` of the gradients if that
        is it.

        All ranks must call it, while they have the gradients of the step.
        """
        first = self.first or _first(flats)
        own = (
            not math.isfinite(summed.item()),
            bool(self.made) and not bool(torch.stack(self.made).isfinite().all()),
            self.order.get(first, len(self.order)),
            first,
        )
        everyone = all_gather_object(own, self.world)
        losses = [rank for rank, each in enumerate(everyone) if each[0]]
        makers = losses or [rank for rank, each in enumerate(everyone) if each[1]]
        what = "the gradient is" if norm is None else f"the gradient's norm is {norm},"
        what = "the loss is not finite" if losses else f"{what} not finite"
        where = f"on rank {', '.join(map(str, makers))}" if makers else "as a sum over the ranks"
        *_, named = min(everyone, key=lambda each: each[2])
        found = f"; the first parameter with a non-finite gradient is {named}" if named else ""
        return NonFiniteError(f"Step {step}: {what}, {where}{found}. It was not used in any update")


def _sum(x: Tensor) -> Tensor:
    return x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).double()


@torch.no_grad()
def _first(flats: Sequence[Flat]) -> str:
    """The first parameter with a non-finite gradient in this rank's shards; "" if none has."""
    blocks = ((flat, flat.grads.gshard) for flat in flats)
    named = (
        (name, block[low:high])
        for flat, block in blocks
        if block is not None
        for name, (low, high) in zip(flat.names, flat.pieces, strict=True)
    )
    return next((name for name, part in named if not bool(part.isfinite().all())), "")
