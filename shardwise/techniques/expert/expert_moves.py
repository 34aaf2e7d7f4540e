"""Layers of experts as numbers, and the loads of their experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Counts = Sequence[Sequence[int]]


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
