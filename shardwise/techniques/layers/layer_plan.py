"""Plans of single layers: after the plan of the model, `|` and the layers' own words.

    dp4 zero3 | embed,head: tp4 zero1 | blocks.0-3: tp2 dp2 recompute:full

Patterns are fnmatch's; `0-3` between two dots stands for each number of the range. Other words are
the model's. If a layer's plan names `dp` or `tp`, its ranks are a mesh of their own, so the batch
and the weights are split differently there (drawn in exchange.py).

(Galvatron, arXiv 2211.13878; "one weird trick", arXiv 1404.5997, section 4.)
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final

from shardwise.core.errors import bad
from shardwise.core.plan.plan_parser import FIELDS, WORDS, read, word_of, words_of
from shardwise.core.plan.words import NAMES

#: The most numbers of a range.
MOST_LAYERS: Final = 10_000

_PART = re.compile(r"\s*([^\s:|]+):\s+(\S.*)", re.DOTALL)
_RANGE = re.compile(r"([0-9]+)-([0-9]+)")


@dataclass(frozen=True)
class LayerPlan:
    """The layers that match one of `patterns`, and their own words."""

    patterns: tuple[str, ...]
    words: str

    def __str__(self) -> str:
        return f"{','.join(self.patterns)}: {self.words}"

    @property
    def fields(self) -> dict[str, Any]:
        return read(self.words)

    @property
    def has_axes(self) -> bool:
        return "axes" in self.fields

    def matches(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, each) for p in self.patterns for each in _expanded(p))

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """The patterns that match none of `names`, or none for a number of their ranges."""
        known = partial(fnmatch.filter, names)
        return [each for each in self.patterns if not all(map(known, _expanded(each)))]


def split_layers(text: Any) -> tuple[str, tuple[LayerPlan, ...]]:
    if not isinstance(text, str):
        return text, ()
    first, *parts = text.split("|")
    return first, tuple(map(_layer_plan, parts))


def _layer_plan(text: str) -> LayerPlan:
    found = _PART.fullmatch(text.strip())
    if found is None or not NAMES.fullmatch(found[1]):
        raise bad(
            f"'{text.strip()}' after | in a plan",
            "names of layers, a colon, a space and plan words",
            "'dp4 zero3 | embed,head: tp4 zero1 | blocks.0-3: tp2 dp2'",
        )
    patterns, values = tuple(found[1].split(",")), read(found[2])
    for pattern in patterns:
        _expanded(pattern)
    others = [word for word in found[2].split() if not _own(word)]
    if others:
        own = ", ".join(word.form for word in WORDS if word.of_layers)
        raise bad(
            f"'{' '.join(others)}' in the plan of the layers {found[1]}",
            f"the words {own}; everything else is of the whole model",
            f"'{found[1]}: zero3', and other words before the first |",
        )
    return LayerPlan(patterns, words_of({n: values[n] for n in FIELDS if n in values}))


def _own(text: str) -> bool:
    word = word_of(words_of(read(text)))
    return word is not None and word.of_layers


def _expanded(pattern: str) -> Iterator[str]:
    choices: list[Iterable[str]] = []
    for word in pattern.split("."):
        found = _RANGE.fullmatch(word)
        if found is None:
            choices.append([word])
            continue
        first, last = int(found[1]), int(found[2])
        if not first <= last < first + MOST_LAYERS:
            raise bad(
                f"the range {word} in the layers {pattern}",
                f"at most {MOST_LAYERS:,} numbers, the smaller one first",
                f"{pattern.replace(word, f'{min(first, last)}-{min(first, last) + 1}')}",
            )
        choices.append(map(str, range(first, last + 1)))
    return map(".".join, product(*choices))
