"""The check that this version can run a plan: all problems at once, each with a remedy."""

from functools import lru_cache

from shardwise.core.errors import Problem, refusal
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_parser import TECHNIQUES
from shardwise.core.schedule.library import build
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.schedule import Schedule
from shardwise.techniques.layers.layer_plan_check import layer_problems

__all__ = ["Problem", "problems", "require"]


def problems(plan: Plan, world_size: int | None = None) -> list[Problem]:
    own = [problem for each in TECHNIQUES for problem in each.problems(plan, world_size)]
    whole = _world(plan, world_size)
    layers = [] if own or whole else layer_problems(plan.completed(world_size), problems)
    return [*own, *whole, *layers]


def require(plan: Plan, world_size: int | None = None) -> None:
    found = problems(plan, world_size)
    if found:
        raise refusal(f"the plan '{plan}'", found)


def _world(plan: Plan, world_size: int | None) -> list[Problem]:
    if world_size is None or plan.completed(world_size).size == world_size:
        return []
    needs = f"{plan.size} processes" if plan.size > 1 else "1 process"
    runs = "1 runs" if world_size == 1 else f"{world_size} run"
    own = [f"{name}{size}" for name, size in plan.axes if name != "ep"]
    own += [f"cp{plan.cp}"] * (plan.cp > 1)
    product = "*".join(own) or "no axis, so one rank"
    more = " or a multiple" * plan.open
    given = f"the plan '{plan}', which needs {needs}{more} ({product}), where {runs}"
    allowed = "as many processes as the product of the plan's axes"
    if plan.open:
        allowed = "a multiple of the product of the plan's axes; the ranks left over are data ranks"
    instead = f"start {needs}"
    if not plan.open:
        instead += ", or leave the data axis out, which then takes the ranks left over"
    return [Problem(given, allowed, instead)]


# --- the schedule of a plan -----------------------------------------------------------------------


def schedule_of(plan: Plan) -> Schedule | None:
    """The schedule of `plan` with its transfers; None without a pipeline."""
    return None if plan.pipeline is None else _lowered(plan.pipeline, plan.mesh.size_of("pp"))


@lru_cache(maxsize=32)  # a prediction asks for it some twenty times, a search for many
def _lowered(word: str, ranks: int) -> Schedule:
    return lower(build(word, ranks))
