"""The schedule of a plan."""

from functools import lru_cache

from shardwise.core.plan.plan import Plan
from shardwise.core.schedule.library import build
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.schedule import Schedule


def schedule_of(plan: Plan) -> Schedule | None:
    """The schedule of `plan` with its transfers; None without a pipeline."""
    return None if plan.pipeline is None else _lowered(plan.pipeline, plan.mesh.size_of("pp"))


@lru_cache(maxsize=32)  # a prediction asks for it some twenty times, a search for those of many
def _lowered(word: str, ranks: int) -> Schedule:
    return lower(build(word, ranks))
