"""The check that this version can run a plan: all problems at once, each with a remedy."""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

from shardwise.core.errors import Problem, refusal
from shardwise.core.mesh import PIPELINE
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_parser import TECHNIQUES
from shardwise.core.schedule.library import build
from shardwise.core.schedule.lower import lower, most_alive
from shardwise.core.schedule.schedule import Schedule

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


def moments(plan: Plan, place: int) -> list[dict[int, int]]:
    """Microbatches that each stage keeps, at moments when the pipeline rank may keep most bytes."""
    schedule = schedule_of(plan)
    return [{0: 1}] if schedule is None else most_alive(schedule, place)


# --- plans of single layers -----------------------------------------------------------------------


def layer_problems(plan: Plan, of: Callable[[Plan], list[Problem]]) -> list[Problem]:
    """Problems of the plans of single layers; `of` checks a plan without layers."""
    if not plan.layers:
        return []
    if why := next(filter(None, (each.beside_layers(plan) for each in TECHNIQUES)), ""):
        allowed = "words that go with a plan for each layer: axes, rows, schedules that update at "
        allowed += "the end of a step, precisions, accumulate, recompute by modules, offload:optim "
        allowed += "and offload:param"
        instead = f"'{plan.of_layers(0)}' without plans of layers, or without this word"
        return [Problem(f"{why} beside plans of single layers", allowed, instead)]
    return [
        problem for number in range(1, len(plan.layers) + 1) for problem in _of(plan, number, of)
    ] or (_degrees(plan))


def _of(plan: Plan, number: int, of: Callable[[Plan], list[Problem]]) -> list[Problem]:
    layer, own = plan.layers[number - 1], plan.of_layers(number)
    where = f"in the plan of the layers {','.join(layer.patterns)}, "
    if own.size != plan.size:
        ranks = plan.size // plan.mesh.size_of(PIPELINE)
        product = "*".join(f"{name}{size}" for name, size in own.mesh.axes if name != PIPELINE)
        return [
            Problem(
                f"{where}'{layer.words}': {product or 'no axis'}, of {ranks} ranks",
                f"axes whose product is {ranks}, or divides it if it names no data axis",
                f"'{','.join(layer.patterns)}: tp{ranks}'",
            )
        ]
    return [Problem(f"{where}{one.given}", one.allowed, one.instead) for one in of(own)]


def _degrees(plan: Plan) -> list[Problem]:
    """Tensor degrees that do not divide the next larger one, so that no rank's rows are whole."""
    return [
        Problem(
            f"layers with tp{less} and layers with tp{more} in one plan",
            "tensor degrees of which each divides the next larger one, so that rows are gathered "
            "or taken along one axis between two layers",
            f"tp{less * (more // less)} in place of tp{more}",
        )
        for less, more in pairwise(plan.tensor_degrees)
        if more % less
    ]
