"""Plan words of every run: axes, precision, and the memory of a rank's device."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardwise.core.errors import Problem, bad
from shardwise.core.mesh import AXES
from shardwise.core.plan.technique import Field, Technique, Word, flag
from shardwise.core.plan.word_values import MOST, read_size, size_text, whole
from shardwise.core.zero import row_of

if TYPE_CHECKING:
    from shardwise.core.plan.plan import Plan

PRECISIONS: Final = ("fp64", "fp32", "bf16", "fp16")
_AXIS = re.compile(rf"({'|'.join(sorted(AXES, key=len, reverse=True))})([-=:]?)(-?[0-9]*)")


def _axis(word: str) -> tuple[tuple[str, int], ...] | None:
    found = _AXIS.fullmatch(word)
    if found is None:
        return None
    name, between, digits = found.groups()
    if not between and whole(digits):
        return ((name, int(digits)),)
    allowed = f"{name} and a whole number from 1 to {MOST}"
    raise bad(f"the plan word '{word}'", allowed, f"{name}2, or leave {name} out for one rank")


def _axes_text(axes: tuple[tuple[str, int], ...]) -> str:
    ordered = sorted(axes, key=lambda axis: AXES.index(axis[0]) if axis[0] in AXES else 0)
    return " ".join(f"{name}{size}" for name, size in ordered)


def _device_memory(word: str) -> int | None:
    key, _, value = word.partition(":")
    return read_size(key, value) if key == "device_memory" else None


def _problems(plan: "Plan", _: int | None) -> Iterator[Problem]:
    """Arenas without a tensor to put in them, or of sizes that the plan does not fix."""
    if plan.arenas and (why := _no_arenas(plan)):
        allowed = "arenas with recompute:full, selective, partitioned, everyN or names; or with "
        allowed += "zero2 or zero3 and no pipeline"
        yield Problem(f"'arenas' with {why}", allowed, f"'{replace(plan, arenas=False)}'")


def _no_arenas(plan: "Plan") -> str:
    if plan.recompute_budget_bytes:
        return f"recompute:{plan.recompute}, which chooses for each batch what is kept"
    if plan.activations_on_host:
        return "activations in host memory"
    if plan.recompute is None and (plan.pipeline or not row_of(plan.row).moves().shards_gradient):
        return f"{plan.row} and no recomputation, where no tensor has a place in them"
    return ""


#: The axes of a plan, which are of all techniques.
AXES_OF_A_PLAN: Final = Field("axes", "axis", _axis, _axes_text)

TECHNIQUE: Final = Technique(
    words=(
        Word("fp64", "fp64", "computation in 64 bits"),
        Word("fp32", "fp32", "computation in 32 bits"),
        Word("bf16", "bf16", "computation in bfloat16 over fp32 master weights"),
        Word("fp16", "fp16", "computation in float16 over fp32 master weights, scaled loss"),
        Word("arenas", "arenas", "kept inputs and gradients in memory taken before the first step"),
        Word(
            "device_memory:SIZE",
            "device_memory:8GiB",
            "the most that a rank may store on its device",
        ),
    ),
    fields=(
        Field("precision", "precision", lambda word: word if word in PRECISIONS else None),
        flag("arenas"),
        Field(
            "device_memory_bytes",
            "bound on device memory",
            _device_memory,
            lambda nbytes: f"device_memory:{size_text(nbytes)}",
        ),
    ),
    problems=_problems,
    beside_layers=lambda plan: "'arenas'" * plan.arenas,
)
