"""Checks plans of single layers: each plan's own problems, and those of several meshes at once."""

from collections.abc import Callable
from itertools import pairwise

from shardwise.core.errors import Problem
from shardwise.core.mesh import PIPELINE
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_parser import TECHNIQUES


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
