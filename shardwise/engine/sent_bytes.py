"""The bytes an engine's steps send: measured by the ledger, and by the formula of the plan."""

from typing import Any

from shardwise.engine.spec import model_shape
from shardwise.prediction import traffic
from shardwise.prediction.traffic import Line


def predicted(engine: Any, *, first: bool) -> dict[Line, int]:
    """What this rank's steps send by the formula of the plan; the first of a run a little more.

    Activations on the tensor axis, and what ranks compare, are those of the last step.
    """
    more: dict[str, Any] = {"norm": engine.training.clip is not None, "first": first}
    more["meets"] = first or engine.consistency.compared_batch
    more["compares"] = "each" if first else engine.consistency.compared_gradients
    plan, tensors = engine.plan, engine.tensors
    every = (
        traffic.step_bytes(plan, model_shape(engine), engine.world.rank, **more),
        traffic.activation_bytes(plan, tensors.stream.crossings, tensors.stream.losses),
        traffic.crossing_bytes(plan, engine.passes.sent),
    )
    return {k: sum(one.get(k, 0) for one in every) for k in {k for one in every for k in one}}


def measured(engine: Any) -> dict[str, int]:
    """The bytes this rank sent in the last step, by axis and kind."""
    return traffic.by_kind({Line(*k): t.sent_bytes for k, t in engine.last.items()})
