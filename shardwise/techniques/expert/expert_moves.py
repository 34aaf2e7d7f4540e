"""Layers of experts as numbers: what they move between ranks, and the loads that determine it.

gather         the data ranks gather `numel` numbers of each: counts or sizes
gather_counts  the ranks of the axis `ep` gather `numel` numbers of each
gather_padded  the same for scores of every token, padded to the rank with most tokens
sum            the data ranks sum `numel` numbers, and their gradients (`returns` times)
dispatch       rows go to the ranks of their experts, and their gradients back (`returns` times)
combine        the results come back, and their gradients go the other way
enter          nothing moves; ranks of the tensor axis sum the gradients (`returns` times)
leave          ranks of the tensor axis sum the outputs
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Counts = Sequence[Sequence[int]]

Kind = Literal[
    "gather", "gather_counts", "gather_padded", "sum", "dispatch", "combine", "enter", "leave"
]


@dataclass(frozen=True)
class ExpertMove:
    """One move of a layer in a pass of the plain model, with `numel` elements of one process."""

    kind: Kind
    numel: int
    element_bytes: int
    phase: str = "forward"
    returns: int = 0
    tokens: int = 0


class LayerMove(NamedTuple):
    """A move of the layer of that name, made after `calls` calls of modules (ModelPass)."""

    layer: str
    move: ExpertMove
    calls: int = 0


@dataclass(frozen=True)
class ExpertLayer:
    """A layer of experts for tokens of `width`.

    A token has `least` to `choices` experts. An expert computes at most `capacity` times its even
    share of the choices of the global batch; None: no bound. With `takes` each expert takes exactly
    that many tokens (expert choice). With `by_shard` a tensor rank dispatches, under `sp`, the
    tokens of its shard of the sequence, else those of whole rows.
    """

    experts: int
    least: int
    choices: int
    width: int
    capacity: float | None = None
    takes: bool = False
    by_shard: bool = False


@dataclass(frozen=True)
class Loads:
    """What the experts compute of one microbatch.

    tokens   by data rank
    choices  by layer: [R][E], how many choices of each data rank each expert computes
    shards   of layers `by_shard` under `sp`: the same by tensor rank, of its shard of the sequence
    """

    tokens: Sequence[int]
    choices: Mapping[str, Counts]
    shards: Mapping[str, tuple[Counts, ...]] = field(default_factory=dict[str, tuple[Counts, ...]])

    def on(self, layer: str, tensor_rank: int) -> Counts:
        shards = self.shards.get(layer)
        return self.choices[layer] if shards is None else shards[tensor_rank]
