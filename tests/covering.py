"""The pairwise covering array: plans in which every two words that may meet do meet.

    python -m tests.covering > tests/covering.txt

A word is one value of a factor; a plan has at most one value of each.  Two words may meet if some
plan with both is accepted: by its words, and by `parallelize` for its model on a traced rank.
Pairs of the canonical plans (tests/plans.py) are not needed again. A plan begins with a new pair,
drawn with a fixed seed, and gets words that add new pairs for what they cost.
"""

import itertools
import random
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import torch

from shardwise.comm.world import traced
from shardwise.core.errors import InputError
from shardwise.core.plan.plan_check import problems
from shardwise.core.schedule.library import LIBRARY
from tests.engine.cases import build
from tests.plan_runs import Proof
from tests.plans import BATCH_ROWS, CANONICAL

SEED = 20261
MOST_RANKS = 8
TRIED = 3  # values of a factor that are tried for one plan
FILE = Path(__file__).with_suffix(".txt")

PIPES = {"M": "4", "MxV": "4x2", "": ""}
SCHEDULED = [f"pp2 {name}:{PIPES[entry.numbers]}".rstrip(":") for name, entry in LIBRARY.items()]
#: The values of each factor; every word stands for its technique.
FACTORS: dict[str, list[str]] = {
    "data": ["dp2", "dp_replicate2 dp_shard2"],
    "row": ["ddp", "zero1", "zero2", "zero3", "row:R,R,S"],
    "tensor": ["tp2", "tp2 sp"],
    "context": ["cp2", "cp2:ulysses"],
    "pipeline": [*SCHEDULED, "pp2 interleaved:2x2 stages:2,1,1,1"],
    "experts": ["ep2"],
    "accumulate": ["accumulate:2"],
    "recompute": [
        *("recompute:full", "recompute:selective", "recompute:every2", "recompute:blocks.0"),
        *("recompute:1MiB", "recompute:partitioned", "recompute:partitioned-host"),
    ],
    "activations": ["activations:host"],
    "offload": [
        *("offload:optim", "offload:param", "offload:optim@disk"),
        *("offload:param@disk", "offload:optim-delayed=1"),
    ],
    "tile": ["tile:2", "tile:2=head"],
    "bucket": ["bucket:4KiB"],
    "buffers": ["buffers:64KiB"],
    "arenas": ["arenas"],
    "layers": ["| blocks.1: zero3", "| head: tp2", "| blocks.0: recompute:full"],
}
Words = dict[str, str]
Pair = frozenset[str]


def text_of(words: Mapping[str, str]) -> str:
    chosen = [words.get(factor, "") for factor in FACTORS]
    *plain, layers = chosen
    return " ".join(word for word in [*plain, "fp64", layers] if word)


def accepted(words: Mapping[str, str]) -> bool:
    """Whether the plan may be run: by its words, by its size, and for its model."""
    return runs(text_of(words))


@cache
def runs(text: str) -> bool:
    """Whether `parallelize` accepts the plan for its model."""
    try:
        proof = Proof(text)
        ranks = proof.plan.size
        pieces = proof.plan.shares * proof.plan.microbatches  # each has a row at least
        if ranks > MOST_RANKS or pieces > BATCH_ROWS or problems(proof.plan, ranks):
            return False
        build(traced(0, ranks), proof.task, proof.case)
    except InputError:
        return False
    return True


def pairs_of(words: Mapping[str, str]) -> set[Pair]:
    return {frozenset(two) for two in itertools.combinations([w for w in words.values() if w], 2)}


def candidates() -> list[Words]:
    """Every two words of different factors, as a plan's beginning."""
    return [
        {one: a, other: b}
        for one, other in itertools.combinations(FACTORS, 2)
        for a in FACTORS[one]
        for b in FACTORS[other]
    ]


def filled(words: Words, left: set[Pair], own: random.Random) -> Words:
    """The words, and those of other factors that add pairs and do not make pairs cost more."""
    for factor in own.sample(free := [f for f in FACTORS if f not in words], len(free)):
        pairs = {v: len(pairs_of(words | {factor: v}) & left) for v in FACTORS[factor]}
        most = sorted(pairs, key=pairs.__getitem__, reverse=True)[:TRIED]
        more = (words | {factor: v} for v in most if pairs[v] > len(pairs_of(words) & left))
        worth = gain(words, left)
        found = (w for w in more if accepted(w) and gain(w, left) >= worth)
        words = next(found, words)
    return words


def gain(words: Words, left: set[Pair]) -> float:
    """The pairs that are left and the plan has, for about what its run costs."""
    recorded = {"experts", "activations"} <= words.keys()  # passes, for the loads of experts
    ranks = Proof(text_of(words)).plan.size
    return len(pairs_of(words) & left) / (1 + ranks + 10 * recorded)


def completed(words: Words, own: random.Random) -> bool:
    """Add what the words need of others (data ranks, a row, tensor ranks) until accepted."""
    more = next((more for more in additions(words, own) if accepted(words | more)), None)
    words.update(more or {})
    return more is not None


def additions(words: Words, own: random.Random) -> Iterator[Words]:
    """Up to three words of other factors, the fewest first."""
    needed = ["data", "row", "tensor", "recompute", "offload", "pipeline"]
    free = [factor for factor in needed if factor not in words]
    for number in (1, 2, 3):
        for factors in itertools.combinations(free, number):
            every = list(itertools.product(*(FACTORS[factor] for factor in factors)))
            chosen = own.sample(every, min(len(every), 12))
            yield from (dict(zip(factors, values, strict=True)) for values in chosen)


def can_meet(start: Words) -> bool:
    """Whether some plan with the words is accepted."""
    return accepted(start) or completed(dict(start), random.Random(SEED))


def covering() -> list[str]:
    own, plans = random.Random(SEED), list[Words]()
    starts = {pair: dict(start) for start in candidates() for pair in pairs_of(start)}
    left = {p for p, words in starts.items() if accepted(words) or completed(words, own)}
    left -= written()
    while left:
        plans.append(filled(starts[own.choice(sorted(left, key=sorted))], left, own))
        left -= pairs_of(plans[-1])
    return [text_of(words) for words in plans]


def written() -> set[Pair]:
    """The pairs of the canonical plans."""
    plans = (words_of(plan) for own in CANONICAL.values() for plan in own)
    return set[Pair]().union(*map(pairs_of, plans))


def read() -> list[str]:
    return FILE.read_text().splitlines()


def words_of(text: str) -> Words:
    """The words of a plan that `text_of` wrote, by factor."""
    base, bar, layers = text.partition("|")
    there, found = set(base.split()), dict[str, str]()
    for factor, values in FACTORS.items():
        for value in sorted(values, key=len):  # "tp2 sp" is not "tp2"
            if there >= {*value.split()} or (bar and value == f"|{layers}"):
                found[factor] = value
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(*covering(), sep="\n")
