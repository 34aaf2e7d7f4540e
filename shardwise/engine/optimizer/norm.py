"""The norm of all gradients, the factors of a step's losses, and the loss scale.

Norm.  Each element is counted once over all ranks.  One fp32 sum over ten million elements is wrong
by 6e-4 on a processor, because late terms vanish beside the sum.  Rows of 2^16 elements are summed
in fp32 and added up in fp64: wrong by 6e-7, as fast.

Normalisation.  The loss of a microbatch is the mean over its t tokens.  Its backward pass begins
with t P / T: the step has T tokens, in P microbatches of all data ranks that have any.  The update
divides the sum of all gradients by P, which makes it the gradient of the mean over the T tokens. If
all P have equally many tokens, the factor is 1: a hook, or a function that adds a gradient in its
backward pass, sees the gradient of the microbatch's own mean, as under torch's DDP.

Dynamic loss scaling keeps fp16 gradients inside fp16's range.  The loss is multiplied by the scale,
and gradients are divided by it before the update.  If a gradient is not finite, every rank skips
the update and halves the scale; after `patience` good updates the scale is doubled.  (Micikevicius
et al., "Mixed precision training", arXiv 1710.03740, 3.2.)
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.comm.tiers.host_memory import doubles_on
from shardwise.comm.transport import Pending

ROW = 2**16


def squared_norm(x: Tensor) -> Tensor:
    """The sum of squares of flat `x`, a 0-d double on its device."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    whole = x.numel() - x.numel() % ROW
    rows = torch.linalg.vector_norm(x[:whole].view(-1, ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(x[whole:], dtype=dtype)
    return rows.double().square().sum() + rest.double().square()


def power_sum(x: Tensor, power: float) -> Tensor:
    """The sum of powers of flat `x`'s absolute values, or their maximum for inf; a 0-d double."""
    if power == 2:
        return squared_norm(x)
    if math.isinf(power):
        return torch.cat([x.new_zeros(1), x]).abs().amax().double()
    return x.double().abs().pow(power).sum()


# --- factors of the losses, and the loss scale ----------------------------------------------------


_LEAST = 1e-30  # tokens, or weights of tokens, of a batch that has any


class LossWeights:
    """The factors of a step's microbatches, from numbers that are summed while the forward runs.

    `counts` are the tokens of this rank's microbatches; an update uses `size` of them (0: all).
    `begin_sum` begins the sum over the data ranks, which may be this one `alone`; `scale` is the
    loss scale.
    """

    def __init__(
        self,
        counts: Sequence[float],
        size: int,
        begin_sum: Callable[[Tensor], Pending[Tensor]],
        device: torch.device,
        scale: float = 1.0,
        *,
        alone: bool = False,
    ) -> None:
        self.scale, size = scale, size or len(counts)
        parts = [counts[k : k + size] for k in range(0, len(counts), size)]
        own = [float(sum(part)) for part in parts]
        own += [float(sum(n > 0 for n in part)) for part in parts]
        #: P times the loss scale, if this rank is the only one that computes tokens
        self.alone = self.scale * max(1.0, sum(n > 0 for n in counts)) if alone else None
        self._arriving = begin_sum(doubles_on(own, device))
        self._totals: Tensor | None = None

    @property
    def totals(self) -> Tensor:
        """The tokens of each update of the step, then its microbatches: [2, updates], doubles."""
        if self._totals is None:  # no cached_property, on whose lock ranks in threads would wait
            self._totals = self._arriving.wait().view(2, -1)
        return self._totals

    def correction(self, tokens: Tensor) -> Tensor:
        """What an update multiplies by after a synchronous schedule: T over P, the loss scale and
        the step's `tokens`.  Doubles [1] on the device.
        """
        total, parts = self.totals.sum(1).split(1)
        each = tokens.clamp(min=_LEAST) * parts.clamp(min=1)
        return total.clamp(min=_LEAST) / (each * self.scale)

    def of(self, tokens: float, update: int) -> Tensor:
        """The factor of the mean loss of a microbatch: a double on the device."""
        total, parts = self.totals[:, update]
        return self.scale * (tokens * parts / total.clamp(min=_LEAST))


def counted(tokens: float) -> float:
    """The number of tokens in a sum of doubles: whole, unless the program counts by weights."""
    return round(tokens) if abs(tokens - round(tokens)) <= 1e-9 * tokens else tokens


class LossScale:
    """The loss scale, and the number of good updates since it changed; constant 1 if off."""

    def __init__(self, on: bool, first: float = 2.0**16, patience: int = 2000) -> None:
        self.on, self.patience = on, patience
        self.value = first if on else 1.0
        self.good = 0

    def of_each(self, microbatches: int) -> float:
        """The scale of each microbatch, such that their sum stays in fp16's range."""
        return self.value / (2 ** (microbatches - 1).bit_length() if self.on else 1)

    def update(self, overflow: bool) -> None:
        """Adjust the scale after an update or a skipped one."""
        if not self.on:
            return
        if overflow:
            self.value, self.good = max(self.value / 2, 2.0**-14), 0
            return
        self.good += 1
        if self.good == self.patience:
            self.value, self.good = min(self.value * 2, 2.0**24), 0


class Spikes:
    """Leaves out steps whose gradients' norm is more than `most` deviations above the mean of the
    steps before; None leaves out none.  Mean and variance forget (ZClip, arXiv 2504.02507, section
    3), and nothing is left out before they know `FIRST` steps.
    """

    FIRST, FORGETS = 25, 0.97

    def __init__(self, most: float | None) -> None:
        self.most = most
        self.known = torch.zeros(3, dtype=torch.float64, device="cpu")  # steps, mean, variance

    def without(self, squares: Tensor, correction: Tensor) -> Tensor:
        """The sum of squares [1] of the gradients, infinite for a step to leave out."""
        if self.most is None:
            return squares
        norm, known = squares.sqrt() * correction, self.known.to(squares.device)
        steps, mean, variance = known.split(1)
        far = (norm > mean + self.most * variance.sqrt()) & (steps >= self.FIRST)
        kept, off = (steps / (steps + 1)).clamp(max=self.FORGETS), norm - mean
        new = [steps + 1, mean + (1 - kept) * off, kept * (variance + (1 - kept) * off.square())]
        self.known = torch.where(norm.isfinite() & ~far, torch.cat(new), known)
        return torch.where(far, math.inf, squares)
