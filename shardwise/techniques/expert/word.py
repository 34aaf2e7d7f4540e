"""The plan word of expert parallelism."""

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING, Final

from shardwise.core.errors import Problem
from shardwise.core.plan.words import Technique, Word

if TYPE_CHECKING:
    from shardwise.core.plan.plan import Plan


def _problems(plan: "Plan", world_size: int | None) -> Iterator[Problem]:
    plan = plan.completed(world_size)
    axis, ranks = plan.inner_data_axis, plan.mesh.size_of(plan.inner_data_axis)
    if ranks % plan.ep:
        allowed = f"a divisor of the {ranks} ranks of {axis}, over which experts are distributed"
        yield Problem(f"'ep{plan.ep}' with {axis}{ranks}", allowed, f"ep{gcd(plan.ep, ranks)}")


TECHNIQUE: Final = Technique(
    words=(
        Word("epN", "ep2", "expert parallelism: each expert on one of N neighbouring data ranks"),
    ),
    problems=_problems,
)
