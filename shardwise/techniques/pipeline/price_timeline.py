"""The memory of a pipeline's step after each F, B, I and W of a rank: predicted from the schedule.

    1F1B, stage 0 of 2      F0  F1  B0  F2  B1  F3  B2  B3
    microbatches kept       1   2   1   2   1   2   1   0

Under `ddp` and `zero1` a rank always has full parameters and gradients, so only kept activations
change. F adds the activations of its stage and microbatch, and B releases them. If the backward
pass has two halves, W releases them: the graph lives until then (techniques/pipeline/backward.py).
"""

from typing import Final

from shardwise.core.plan_schedule import schedule_of
from shardwise.core.schedule.action import COMPUTE_OPS
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.rank_shape import stage_bytes
from shardwise.prediction.timeline import Event
from shardwise.techniques.recompute.price import storages

#: The change in the number of microbatches whose activations a stage keeps, by action.
CHANGES: Final = {"F": 1, "B": -1, "I": 0, "W": -1}


def staged_timeline(found: Prediction) -> tuple[Event, ...]:
    """The memory of `found.rank` after each F, B, I and W of a step after the first.

    Microbatches have the same shapes, and nothing else changes (timeline.py, `unpredicted`).
    """
    plan, schedule = found.plan, schedule_of(found.plan)
    assert schedule is not None
    of_stage = stage_bytes(found.spec, storages(found.spec.run.tape, found.spec.recomputed))
    names = ("parameters", "gradients", "optimizer", "buffers")
    resting = {name: found.memory[name] for name in names} | {"gathered": 0}
    row = list(schedule.actions(plan.mesh.coordinate(found.rank).get("pp", 0)))
    events: list[Event] = []
    kept_bytes = 0
    for action in [a for _ in range(plan.accumulate) for a in row if a.op in COMPUTE_OPS]:
        kept_bytes += of_stage[action.stage] * CHANGES[action.op]
        events.append(Event(str(action), "", 0, resting | {"kept": kept_bytes}))
    return (*events, *(Event(kind, "", 0, resting | {"kept": 0}) for kind in ("update", "end")))
