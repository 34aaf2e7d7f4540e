"""Factors of the loss before the backward pass: powers of two, which cause no rounding.

Normalisation.  The backward pass computes the gradient of the sum over tokens, times 2^-k.  The
mean needs the number of tokens of the global batch, which no rank knows yet, so 2^k is the power of
two nearest to the previous step's number, and the update multiplies by 2^k / tokens.  A power of
two changes no digit of a gradient (unless it leaves the dtype's range), so gradients do not depend
on the estimate, nor on the number of processes.

Dynamic loss scaling keeps fp16 gradients inside fp16's range.  The loss is multiplied by the scale,
and gradients are divided by it before the update.  If a gradient is not finite, every rank skips
the update and halves the scale; after `patience` good updates the scale is doubled.  (Micikevicius
et al., "Mixed precision training", arXiv 1710.03740, 3.2.)
"""

import math


def power_of_two(tokens: int) -> float:
    """The power of two nearest to `tokens`: between 2/3 and 4/3 of it."""
    mantissa, exponent = math.frexp(tokens)  # tokens = mantissa 2^exponent, 1/2 <= mantissa < 1
    return math.ldexp(1.0, exponent if mantissa > 0.75 else exponent - 1)


class LossScale:
    """The loss scale, and the number of good updates since it changed; constant 1 if off."""

    def __init__(self, on: bool, first: float = 2.0**16, patience: int = 2000) -> None:
        self.on, self.patience = on, patience
        self.value = first if on else 1.0
        self.good = 0

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
