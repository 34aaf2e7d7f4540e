"""Layers of experts as numbers: what they move between ranks, and the loads that determine it.

gather         the data ranks gather `numel` numbers of each: counts or sizes
gather_counts  the ranks of the axis `ep` gather `numel` numbers of each
gather_padded  the same of scores of every token, padded to the rank with most tokens
sum            the data ranks sum `numel` numbers, and their gradients (`returns` times)
dispatch       rows go to the ranks of their experts, and their gradients back (`returns` times)
combine        the rows that these make come back, and their gradients go the other way
enter          nothing moves; ranks of the tensor axis sum the gradients (`returns` times)
leave          ranks of the tensor axis sum the outputs
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal[
    "gather", "gather_counts", "gather_padded", "sum", "dispatch", "combine", "enter", "leave"
]


@dataclass(frozen=True)
class ExpertMove:
    """One move of a layer in a pass of the plain model.

    `numel` are the elements of one process; `tokens` those of which rows are exchanged, or the
    length of the sequences that leave.
    """

    kind: Kind
    numel: int
    element_bytes: int
    phase: str = "forward"
    returns: int = 0
    tokens: int = 0


class LayerMove(NamedTuple):
    """A move of the layer of that name, made after so many calls of modules (ModelPass)."""

    layer: str
    move: ExpertMove
    calls: int = 0


@dataclass(frozen=True)
class ExpertLayer:
    """A layer of experts; `width` is that of a token.

    A token has `least` to `choices` experts. An expert computes at most `capacity` times its even
    share of the choices of the global batch; None: no bound. With `takes` each expert takes exactly
    that many tokens (expert choice).
    """

    experts: int
    least: int
    choices: int
    width: int
    capacity: float | None = None
    takes: bool = False


@dataclass(frozen=True)
class Loads:
    """What the experts compute of one microbatch.

    tokens   by data rank
    choices  by layer: [R][E], how many choices of each data rank each expert computes
    """

    tokens: tuple[int, ...]
    choices: Mapping[str, tuple[tuple[int, ...], ...]]
