"""The bound for 16-bit runs: an error of at most 1.5 times that of one process.

Both errors are taken against a run in fp64 that begins with the same rounded weights: what is
compared is not how far the two 16-bit runs are apart, but how far each is from what is true. A
rank that rounds its own share of a gradient, and rounds the sum again, is a little further from
it: by a factor of sqrt(2) where all the error of one process is its last rounding, and by some
percent where, as in most tensors, the error comes from all the layers between.

Of a tensor with n elements the norm of an error is known to about 1 in sqrt(n); but neighbours in
a row or a column share the rounding of one activation, so they count as fewer.

    many     1024 elements or more: each tensor for itself, and each rank's part of it for itself:
                 norm(parallel error)                       <= 1.5  norm(error alone)
                 component of it along the exact values     <= 0.75 norm(error alone)
    few      all such tensors of a kind in one pool, each in units of its error alone, by the
             first rule; and each for itself with 4 in the place of 1.5
    noise    where one process is wrong by half of the tensor or more (the bias of attention keys,
             whose true gradient is zero): 10 in the place of 1.5

The second rule finds what is wrong in scale. Rounding errors point in all directions, and only
about 1 in sqrt(n) of their norm is along the tensor itself, while a gradient that is 3 % too large
is wrong by 3 % along itself and by nothing across; beside an error alone of 3 %, its norm would be
wrong by sqrt(2) only.

Two floors keep luck out of the error alone: the unit roundoff (2^-8 in bf16, 2^-11 in fp16) times
the norm of the tensor, which each rounding of a parallel run may cost; and, for few elements, the
relative error of the pool. Measured over GPT, gpt2, llama and bert, several plans and seeds, the
largest ratios were 1.38, 0.72, 2.3 and 3.1 for the bounds 1.5, 0.75, 4 and 10.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.verify.finding import NEVER, Errors, Part, Parts

MOST = 1.5
MOST_ALONG, MOST_OF_FEW, MOST_OF_NOISE = 0.75, 4.0, 10.0
ENOUGH, NOISE = 1024, 0.5


@dataclass(frozen=True)
class _Sum:
    """Parts that are judged together; errors are relative to the norm of the exact values."""

    parts: tuple[Part, ...]

    @property
    def elements(self) -> int:
        return sum(part.elements for part in self.parts)

    @property
    def exact(self) -> float:
        return math.sqrt(sum(part.exact for part in self.parts))

    @property
    def parallel(self) -> float:
        return math.sqrt(sum(part.parallel for part in self.parts))

    @property
    def alone(self) -> float:
        return math.sqrt(sum(part.alone for part in self.parts))

    @property
    def along(self) -> float:
        return abs(sum(part.along for part in self.parts)) / self.exact if self.exact else 0.0

    @property
    def noise(self) -> bool:
        return self.alone >= NOISE * self.exact

    @property
    def floor(self) -> float:
        return max(self.alone, self.parts[0].rounds * self.exact)


def judged(by_rank: Sequence[Parts]) -> list[Errors]:
    """Of each rank, how many times the error of one process the error of each tensor is.

    A bound other than 1.5 is scaled to it: what does not hold is above 1.5.
    """
    groups: dict[Hashable, list[Part]] = defaultdict(list)
    for rank, found in enumerate(by_rank):
        for part in found.parts:
            groups["copy", part.replica, part.name].append(part)
            groups["rank", rank, part.name].append(part)
    sums = {key: _Sum(tuple(parts)) for key, parts in groups.items()}
    copies = [s for key, s in sums.items() if isinstance(key, tuple) and key[0] == "copy"]
    pooled, usual = _pooled([s for s in copies if s.elements < ENOUGH and not s.noise])
    scores = {key: _score(s, usual) for key, s in sums.items()}
    return [
        Errors(found.kind, *_named(found.parts, rank, scores, pooled))
        for rank, found in enumerate(by_rank)
    ]


def _named(
    parts: Iterable[Part], rank: int, scores: Mapping[Hashable, float], pooled: float
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    found: dict[str, float] = {}
    for part in parts:
        worst = max(scores["copy", part.replica, part.name], scores["rank", rank, part.name])
        found[part.name] = max(found.get(part.name, 0.0), worst)
    if parts:
        found["all tensors of few elements"] = pooled
    return tuple(found), tuple(found.values())


def _pooled(few: Sequence[_Sum]) -> tuple[float, float]:
    """The ratio of small tensors together, and the relative error that is usual among them."""
    elements = sum(s.elements for s in few)
    if not elements:
        return 0.0, 0.0
    usual = math.sqrt(sum(s.elements * _of(s.floor, s.exact) ** 2 for s in few) / elements)
    squares = sum(s.elements * _of(s.parallel, max(s.floor, usual * s.exact)) ** 2 for s in few)
    bound = MOST if elements >= ENOUGH else MOST_OF_FEW
    return min(NEVER, math.sqrt(squares / elements) * MOST / bound), usual


def _score(s: _Sum, usual: float) -> float:
    if s.noise and s.alone:
        return _of(s.parallel, s.alone) * MOST / MOST_OF_NOISE
    if s.elements < ENOUGH:
        return _of(s.parallel, max(s.floor, usual * s.exact)) * MOST / MOST_OF_FEW
    return max(_of(s.parallel, s.floor), _of(s.along, s.floor) * MOST / MOST_ALONG)


def _of(a: float, b: float) -> float:
    return 0.0 if a == 0 else min(NEVER, a / b) if b else NEVER
