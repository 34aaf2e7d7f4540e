"""The check of plans of single layers: their own problems, and those of several meshes at once."""

from collections.abc import Callable
from itertools import pairwise

from shardwise.core.errors import Problem
from shardwise.core.mesh import PIPELINE
from shardwise.core.plan import Plan
from shardwise.core.plan_parser import PARTITIONED_WORDS, recompute_budget
from shardwise.core.schedule.library import updates


def layer_problems(plan: Plan, of: Callable[[Plan], list[Problem]]) -> list[Problem]:
    """Problems of the plans of single layers; `of` finds those of a plan without layers."""
    if not plan.layers:
        return []
    if why := _together(plan):
        allowed = "words that go with a plan for each layer: axes, rows, schedules that update at "
        allowed += "the end of a step, precisions, accumulate, recompute by modules, offload:optim "
        allowed += "and offload:param"
        instead = f"'{plan.of_layers(0)}' without plans of layers, or without this word"
        return [Problem(f"{why} beside plans of single layers", allowed, instead)]
    return [
        problem for number in range(1, len(plan.layers) + 1) for problem in _of(plan, number, of)
    ] or (_degrees(plan))


def _together(plan: Plan) -> str:
    """A word that no plan with plans of layers can have; "" without any."""
    every = [plan.of_layers(number) for number in range(len(plan.layers) + 1)]
    if updates(plan.pipeline, plan.mesh.size_of(PIPELINE)):
        return f"'{plan.pipeline}', which updates each stage by itself,"
    if plan.sp and any(layer.has_axes for layer in plan.layers):
        return "'sp', which shards the sequence between layers,"
    for word, on in (
        ("arenas", plan.arenas),
        (f"tile:{plan.tile}", plan.tile is not None),
        ("activations:host", plan.activations is not None),
    ):
        if on:
            return f"'{word}'"
    for own in every:
        if own.recompute in PARTITIONED_WORDS or recompute_budget(own.recompute):
            return f"'recompute:{own.recompute}'"
        if own.offload not in (None, "optim", "param"):
            return f"'offload:{own.offload}'"
    return ""


def _of(plan: Plan, number: int, of: Callable[[Plan], list[Problem]]) -> list[Problem]:
    """Problems of the plan of one group of layers."""
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
    """Tensor degrees of which one does not divide the next, so that no rank's rows are whole."""
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
