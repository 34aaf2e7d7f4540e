"""The arenas of a rank: how many slots of each size, from the plain model and the plan.

    kept         of each recomputed module, the inputs that a gradient reaches, or this rank's part
                 of them; for every microbatch that its stage keeps at once
    gradients    under zero2 and zero3, of the units that are computed or reduced at once

The memory of an arena is that of its slots, and is counted with the buffers (comm/arena.py).
"""

from collections import Counter

from shardwise.core.arena_slots import IN_FLIGHT, Slots, arena_bytes, gradient_slots, most_at_once
from shardwise.core.mesh import PIPELINE, TENSOR
from shardwise.core.model_spec import ModelShape, ModelSpec
from shardwise.core.plan import Plan
from shardwise.prediction.group import groups
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


def gradients_of(plan: Plan, model: ModelShape) -> Slots:
    """The slots for gradients of a rank's part `model`; none with a pipeline."""
    if plan.pipeline is not None:
        return {}
    sizes: dict[str, list[int]] = {unit.name: [] for unit in model.units}
    for group in groups(plan, model):
        if group.moves.shards_gradient:
            sizes[group.unit.name].append(group.flat.padded * group.element_bytes)
    return gradient_slots([*sizes.values()], IN_FLIGHT)


def arenas_bytes(spec: ModelSpec, plan: Plan, rank: int, model: ModelShape) -> int:
    """The bytes of both arenas of a rank; 0 without the plan word."""
    if not plan.arenas:
        return 0
    return arena_bytes(kept_slots(spec, plan, rank)) + arena_bytes(gradients_of(plan, model))
