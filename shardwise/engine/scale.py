"""What a loss is multiplied by before the backward pass: powers of two, which round nothing.

A gradient is that of the sum over tokens, times 2^-k.  The mean needs the number of tokens of the
global batch, which no rank knows before it has heard from the others: 2^k is the power of two next
to the number of the step before, and the update multiplies by 2^k / tokens.  A power of two changes
no digit of a gradient, in any precision (unless it leaves the range of the dtype), so a gradient is
the same whatever was expected, and the same on one process as on many.

Dynamic loss scaling keeps fp16 gradients inside fp16's range.

The loss is multiplied by a power of two, the gradient divided by it before the update.  An update
whose gradient is not finite is skipped on every rank and the scale halved; after `patience` good
updates it is doubled.  (Micikevicius et al., "Mixed precision training", arXiv 1710.03740, 3.2.)
"""

import math


def power_of_two(tokens: int) -> float:
    """The power of two next to a number of tokens: between 2/3 of it and 4/3."""
    mantissa, exponent = math.frexp(tokens)  # tokens = mantissa 2^exponent, 1/2 <= mantissa < 1
    return math.ldexp(1.0, exponent if mantissa > 0.75 else exponent - 1)


class LossScale:
    """The scale and how long it has held; 1, and never moved, where it is off."""

    def __init__(self, on: bool, first: float = 2.0**16, patience: int = 2000) -> None:
        self.on, self.patience = on, patience
        self.value = first if on else 1.0
        self.good = 0

    def saw(self, overflow: bool) -> None:
        """Take note of one update."""
        if not self.on:
            return
        if overflow:
            self.value, self.good = max(self.value / 2, 2.0**-14), 0
            return
        self.good += 1
        if self.good == self.patience:
            self.value, self.good = min(self.value * 2, 2.0**24), 0
