"""The schedule of a plan."""

from shardwise.core.plan import Plan
from shardwise.core.schedule.library import build
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.schedule import Schedule


def schedule_of(plan: Plan) -> Schedule | None:
    """The schedule of `plan` with its transfers; None without a pipeline."""
    if plan.pipeline is None:
        return None
    return lower(build(plan.pipeline, plan.mesh.size_of("pp")))
