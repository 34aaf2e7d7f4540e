"""Counts of the elements that a layer of experts moves between ranks.

gather     the data ranks gather `numel` numbers of each: counts, sizes or scores
sum        the data ranks sum `numel` numbers, and their gradients (`returns` times)
exchange   `sent[r]` elements go to rank r of the axis `ep`, `received[r]` come from it; their
           gradients go the other way
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ExpertMove:
    """One move of a layer, in the forward pass or in a recomputation."""

    kind: Literal["gather", "sum", "exchange"]
    numel: int
    element_bytes: int
    phase: str = "forward"
    returns: int = 0
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    rank: int = 0
