"""The plan words `recompute` and `activations`: what blocks keep for backward, and where."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardwise.core.errors import Problem, bad
from shardwise.core.mesh import TENSOR
from shardwise.core.plan.words import (
    NAMES,
    Technique,
    Word,
    keyed,
    like_a_size,
    read_size,
    size_bytes,
    size_text,
    whole,
)

if TYPE_CHECKING:
    from shardwise.core.plan.plan import Plan

#: Values of `recompute` that partition inputs over the tensor axis.
PARTITIONED_WORDS: Final = ("partitioned", "partitioned-host")

_EVERY = re.compile("every([0-9]+)")


def recompute_every(what: str) -> int:
    """The N of `recompute:everyN`; 0 for any other value of the word."""
    found = _EVERY.fullmatch(what)
    return whole(found[1]) if found else 0


def recompute_budget(what: str | None) -> int:
    """The bytes of `recompute:SIZE`; 0 for any other value of the word, and without it."""
    return size_bytes(what or "")


def _recompute(value: str) -> str:
    every = _EVERY.fullmatch(value)
    if like_a_size(value):
        return size_text(read_size("recompute", value))
    if every and whole(every[1]) > 1:
        return f"every{whole(every[1])}"
    if NAMES.fullmatch(value) and not every:
        return value
    allowed = (
        "recompute: and full, selective, partitioned, partitioned-host, everyN with N from 2, "
        "a budget such as 8GiB, or patterns of module names"
    )
    raise bad(f"the plan word 'recompute:{value}'", allowed, "recompute:full")


def _activations(value: str) -> str:
    if value == "host":
        return value
    allowed = "activations:host; without the word they stay on the device"
    raise bad(f"the plan word 'activations:{value}'", allowed, "activations:host")


def _problems(plan: "Plan", _: int | None) -> Iterator[Problem]:
    word = f"recompute:{plan.recompute}"
    if plan.recompute in PARTITIONED_WORDS and plan.mesh.size_of(TENSOR) == 1:
        given = f"'{word}' without tensor parallelism, whose ranks would share inputs"
        allowed = f"{word} together with tpN of two ranks or more"
        instead = f"'{replace(plan, recompute='full')}', or tp2 beside it"
        yield Problem(given, allowed, instead)
    if plan.activations is not None and recompute_budget(plan.recompute):
        given = f"'{word}', a budget of device memory, with 'activations:host'"
        allowed = "a budget alone; or activations:host with recompute:full, selective, everyN or "
        allowed += "names"
        yield Problem(given, allowed, f"'{replace(plan, activations=None)}'")


def _beside_layers(plan: "Plan") -> str:
    if plan.activations is not None:
        return "'activations:host'"
    every = (own.recompute for own in plan.of_all_layers)
    other = (word for word in every if word in PARTITIONED_WORDS or recompute_budget(word))
    return next((f"'recompute:{word}'" for word in other), "")


TECHNIQUE: Final = Technique(
    words=(
        Word(
            "recompute:WHAT",
            "recompute:full",
            "recompute activations in the backward pass",
            values=(
                ("recompute:full", "every block"),
                ("recompute:selective", "every block, without its matrix products and attention"),
                ("recompute:everyN", "blocks 0, N, 2N, ..."),
                ("recompute:NAMES", "modules whose names match: blocks.*.mlp"),
                ("recompute:SIZE", "what must be, to keep at most SIZE of activations on a rank"),
                (
                    "recompute:partitioned",
                    "every block; each tensor rank keeps a part of its input",
                ),
                ("recompute:partitioned-host", "the same, with the parts in host memory"),
            ),
            of_layers=True,
        ),
        Word(
            "activations:host", "activations:host", "keep the activations of blocks in host memory"
        ),
    ),
    fields=(
        keyed("recompute", "choice of recomputation", _recompute),
        keyed("activations", "tier of activations", _activations),
    ),
    problems=_problems,
    beside_layers=_beside_layers,
)
