"""The bound for 16-bit runs: an error of at most 1.5 times that of one process.

Both errors are relative to a run in fp64 with the same rounded initial weights. "Alone" is that of
one process. A rank rounds its share of a gradient and the sum is rounded again, so the error of a
parallel run is larger: by a factor of sqrt(2) at most, and by a few percent in most tensors.

Both are sums of n independent roundings (`independent` of difference.py): fewer than elements, as a
row or a column shares the rounding of one activation, and the largest values count most. The
logarithm of the ratio of two such norms varies by 1/sqrt(n), and the component of an error along
the values by sqrt(3/n) of its norm. Hundreds of tensors are compared, so four of these are
allowed, beside the factor sqrt(2):

    many     1024 elements or more: for each tensor, and for each rank's part of it,
                 norm(parallel error)         <= max(1.5, sqrt(2) exp(4 / sqrt(n))) norm(alone)
                 its component along the exact values
                                              <= max(0.75, sqrt(2) 4 sqrt(3/n)) norm(alone)
                                                 or sqrt(2) 4 drift
    few      fewer elements: the first rule for all such tensors of a kind together, if they have
             1024, each relative to its alone, with the largest n of one, because all share the
             roundings before them; and for each tensor both rules, with 4 and 2 instead of 1.5 and
             0.75
    noise    alone is half of the tensor or more (the bias of attention keys, whose exact gradient
             is zero): 10 instead of 1.5

`drift` is the component of alone along the values, or its standard deviation, if the errors of a
row or of a column may agree. It is large where a few of the largest values determine it.

The second rule detects wrong scales: the error of a gradient that is 3 % too large lies completely
along the tensor, while the component of rounding errors is about 1/sqrt(n) of their norm; if alone
is 3 % too, it increases the norm of the error only by sqrt(2).

Two floors keep alone from being small by chance: the unit roundoff (2^-8 in bf16, 2^-11 in fp16)
times the norm of the tensor; and, for few elements, the relative error of all small tensors.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Final

import torch
from torch import Tensor

from shardwise.engine.engine import Engine
from shardwise.verify.difference import ratio
from shardwise.verify.finding import NEVER, Errors, Part, Parts

MOST = 1.5
MOST_ALONG, MOST_OF_FEW, MOST_OF_NOISE = 0.75, 4.0, 10.0
ENOUGH, NOISE = 1024, 0.5
SIGMAS = 4.0  # beyond which no error of a right run is


@dataclass(frozen=True)
class _RoundedSum:
    """Parts whose errors are combined; `alone`, `parallel`, `exact` and `along` are norms."""

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
    def drift(self) -> float:
        varies = math.sqrt(sum(part.drift_varies for part in self.parts))
        return ratio(max(varies, abs(sum(part.drift for part in self.parts))), self.exact)

    @property
    def noise(self) -> bool:
        return self.alone >= NOISE * self.exact

    @property
    def independent(self) -> float:
        """How many roundings determine `alone`, if the parts share none."""
        total = sum(part.alone for part in self.parts)
        shares = sum(part.alone**2 / part.independent for part in self.parts)
        known = total > 0 and math.isfinite(shares) and shares > 0
        return total**2 / shares if known else sum(part.independent for part in self.parts)

    @property
    def floor(self) -> float:
        return max(self.alone, self.parts[0].rounds * self.exact)


def error_ratios(by_rank: Sequence[Parts]) -> list[Errors]:
    """By rank, each tensor's error over one process's, scaled so that the bound is 1.5 for all."""
    groups: dict[Hashable, list[Part]] = defaultdict(list)
    for rank, found in enumerate(by_rank):
        for part in found.parts:
            groups["copy", part.replica, part.name].append(part)
            groups["rank", rank, part.name].append(part)
    sums = {key: _RoundedSum(tuple(parts)) for key, parts in groups.items()}
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


def _pooled(few: Sequence[_RoundedSum]) -> tuple[float, float]:
    """The ratio of all small tensors together, and their usual relative error."""
    elements = sum(s.elements for s in few)
    if not elements:
        return 0.0, 0.0
    usual = math.sqrt(sum(s.elements * ratio(s.floor, s.exact) ** 2 for s in few) / elements)
    ratios = [(s.elements, ratio(s.parallel, max(s.floor, usual * s.exact))) for s in few]
    squares = sum(n * each * each for n, each in ratios)  # a power would raise where it is huge
    of_all = math.sqrt(squares / elements) if elements >= ENOUGH else 0.0
    by_chance = SIGMAS / math.sqrt(max(s.independent for s in few))  # they share earlier roundings
    return min(NEVER, of_all * MOST / _most(MOST, by_chance)), usual


def _score(s: _RoundedSum, usual: float) -> float:
    if s.noise and s.alone:
        return ratio(s.parallel, s.alone) * MOST / MOST_OF_NOISE
    few = s.elements < ENOUGH
    floor = max(s.floor, usual * s.exact) if few else s.floor
    least, by_chance = MOST_OF_FEW if few else MOST, SIGMAS / math.sqrt(s.independent)
    along = max(least * MOST_ALONG / MOST, math.sqrt(2 * 3) * by_chance)
    along = max(along, math.sqrt(2) * SIGMAS * ratio(s.drift, floor))
    of_norm = ratio(s.parallel, floor) * MOST / _most(least, by_chance)
    return max(of_norm, ratio(s.along, floor) * MOST / along)


def _most(least: float, by_chance: float) -> float:
    return max(least, math.sqrt(2) * math.exp(by_chance))


# --- the update in 16 bits ------------------------------------------------------------------------
#
#     gradient in 16 bits ---> in 32 bits, unscaled: g ---> m = b m + (1 - b) g of AdamW, in 32 bits
#
# Gradients in 16 bits may differ from one process's by their rounding, which hides a second one
# behind them. The first moment is in 32 bits: made again, it is equal but for the last digits.

_MOMENT: Final = "optim/exp_avg/"
#: The error that is allowed, relative to the largest value.
_ROUNDING: Final = 4 * torch.finfo(torch.float32).eps

#: By the name of a parameter, and the place of a rank's part in it.
Moments = dict[tuple[str, tuple[int, ...]], Tensor]


def moments(engine: Engine) -> Moments:
    boxes = [box for box in engine.boxes() if box.name.startswith(_MOMENT)]
    return {(b.name.removeprefix(_MOMENT), b.offsets): b.tensor.detach().clone() for b in boxes}


def moment_errors(engine: Engine, before: Moments) -> Errors:
    """The moments after a step, by those before it. Parameters without a gradient keep theirs."""
    flats = [flat for flat in engine.flats if flat.trained]
    pairs = (pair for f in flats for pair in zip(f.names, f.grads.used, strict=True))
    used = {f"grad/{name}" for name, has in pairs if has}
    boxes = [box for box in engine.gradients() if box.name in used]
    gradients = {(b.name.removeprefix("grad/"), b.offsets): b.tensor.clone() for b in boxes}
    after, facts, spec = moments(engine), dict[str, bool](), engine.optimizer.spec
    for (name, at), gradient in gradients.items():
        groups = (options for pattern, options in spec.groups.items() if fnmatch(name, pattern))
        beta, _ = next(groups, {}).get("betas", spec.options["betas"])
        found, start = after[name, at], before.get((name, at))
        start = torch.zeros_like(found) if start is None else start
        expected = start.lerp(gradient.to(found), 1 - beta)
        allowed = _ROUNDING * expected.abs().max() if found.numel() else 0.0
        facts[name] = facts.get(name, True) and bool(((found - expected).abs() <= allowed).all())
    return Errors.of_facts("update", facts)


def published(engine: Engine) -> Errors:
    """Whether flat parameters in 16 bits are their rounded masters; `boxes()` finished updates."""
    facts = dict[str, bool]()
    for flat, master in engine.optimizer.masters.items():
        rounded, found = master.to(flat.dtype), flat.shard
        facts[f"{flat.names[0]} in 16 bits"] = torch.equal(rounded.to(found.device), found)
    return Errors.of_facts("update", facts)
