"""The slots of a rank's arenas for the inputs that recomputation keeps (comm/tiers/arena.py).

Of each recomputed module, the inputs that a gradient reaches, or this rank's part of them; for
every microbatch that its stage keeps at once.
"""

from collections import Counter

from shardwise.core.buffer_sizes import Slots, most_at_once
from shardwise.core.mesh import PIPELINE, TENSOR
from shardwise.core.model_spec import ModelSpec
from shardwise.core.plan.plan import Plan
from shardwise.prediction.rank_shape import moments, stage_of
from shardwise.techniques.recompute.price import PARTITIONED


def kept_slots(spec: ModelSpec, plan: Plan, rank: int) -> Slots:
    """The slots for kept inputs."""
    ranks = plan.mesh.size_of(TENSOR)
    by_stage: dict[int, Counter[int]] = {}
    for taken in spec.run.tape.taken:
        kind = spec.recomputed.get(taken.module)
        if kind is not None and taken.trained:
            numel = -(-taken.numel // ranks) if kind == PARTITIONED else taken.numel
            sizes = by_stage.setdefault(stage_of(spec, taken.module), Counter[int]())
            sizes[numel * taken.element_bytes] += 1
    every = moments(plan, plan.mesh.coordinate(rank).get(PIPELINE, 0))
    return most_at_once(
        sum(
            (by_stage.get(stage, Counter()) for stage in Counter(moment).elements()), Counter[int]()
        )
        for moment in every
    )
