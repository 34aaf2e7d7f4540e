"""The memory of a pipeline's step after each F, B, I and W of a rank: predicted from the schedule.

    1F1B, stage 0 of 2      F0  F1  B0  F2  B1  F3  B2  B3
    microbatches kept       1   2   1   2   1   2   1   0

F adds the activations of its stage and microbatch, and B releases them. If the backward pass has
two halves, W releases them: the graph lives until then (techniques/pipeline/backward.py). Units are
gathered and freed as the order of units says. Rows that shard gradients store the whole gradients
of a stage from its first B or W until they are reduced, after its last.
"""

from collections import deque
from typing import Final

from shardwise.prediction.memory_timeline import Event, StepBytes
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.rank_shape import parts_on, stage_bytes
from shardwise.prediction.unit_acts import StageActs, by_unit
from shardwise.techniques.recompute.price import storages

#: The change in the number of microbatches whose activations a stage keeps, by action.
CHANGES: Final = {"F": 1, "B": -1, "I": 0, "W": -1}


def staged_timeline(found: Prediction, ahead: int = 1) -> tuple[Event, ...]:
    """The memory of `found.rank` after each F, B, I and W of a step after the first.

    Microbatches have the same shapes. `ahead` is the option `prefetch`.
    """
    spec, plan, rank = found.spec, found.plan, found.rank
    of_stage = stage_bytes(spec, storages(spec.run.tape, spec.recomputed))
    own = by_unit(plan, found.model)
    staged = StageActs(plan, parts_on(spec, plan, rank), rank, ahead, own)
    deque(staged.run(), 0)  # the first run learns the order of units
    memory, kept_bytes = StepBytes(found, staged.acts), 0
    for run in range(plan.accumulate):
        for action in staged.run():
            if action.op == "REDUCE" and run == plan.accumulate - 1:
                memory.do(staged.order.reduce_stage(action.stage))
            if action.op not in CHANGES:
                continue
            kept_bytes += of_stage[action.stage] * CHANGES[action.op]
            filled = staged.of_stage[action.stage] if action.op in "BW" else ()
            for unit, group in ((n, group) for n in filled for group in memory.units[n]):
                memory.fill(unit, group)
            memory.see(str(action), "", kept_bytes)
    memory.do(staged.order.reduce_last())
    memory.update()
    return tuple(memory.events)
