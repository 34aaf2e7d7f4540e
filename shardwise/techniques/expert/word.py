"""The plan word of expert parallelism."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from shardwise.core.errors import Problem
from shardwise.core.plan.words import Technique, Word

if TYPE_CHECKING:
    from shardwise.core.plan.plan import Plan

_MOST_LISTED: Final = 64


def _problems(plan: "Plan", world_size: int | None) -> Iterator[Problem]:
    plan = plan.completed(world_size)
    axis, ranks = plan.inner_data_axis, plan.mesh.size_of(plan.inner_data_axis)
    if ranks % plan.ep:
        degrees = [n for n in range(1, min(ranks, _MOST_LISTED) + 1) if ranks % n == 0]
        allowed = f"a divisor of the {ranks} ranks of {axis}, over which experts are distributed: "
        allowed += ", ".join(f"ep{n}" for n in degrees)
        instead = f"ep{max(n for n in degrees if n <= plan.ep)}"
        yield Problem(f"'ep{plan.ep}' with {axis}{ranks}", allowed, instead)


TECHNIQUE: Final = Technique(
    words=(
        Word("epN", "ep2", "expert parallelism: each expert on one of N neighbouring data ranks"),
    ),
    problems=_problems,
)
