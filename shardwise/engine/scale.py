"""this file is dynamic loss scaling: fp16 gradients kept inside fp16's range.

The loss is multiplied by a power of two, the gradient divided by it before the update.  An update
whose gradient is not finite is skipped on every rank and the scale halved; after `patience` good
updates it is doubled.  (Micikevicius et al., "Mixed precision training", arXiv 1710.03740, 3.2.)
"""


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
