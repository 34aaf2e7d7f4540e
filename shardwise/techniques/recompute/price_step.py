"""What recomputation sends and stores: gathered inputs, copies to the host, and arenas.

A rank gathers the inputs of recomputed modules that it keeps a part of, and copies activations to
its host and back (price_host.py). Its arenas have so many slots of each size:

    kept         of each recomputed module, the inputs that a gradient reaches, or this rank's part
                 of them; for every microbatch that its stage keeps at once
    gradients    under zero2 and zero3, of the units that are computed or reduced at once

The memory of an arena is that of its slots, and is counted with the buffers (comm/tiers/arena.py).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from shardwise.core.buffer_sizes import IN_FLIGHT, Slots, arena_bytes, gradient_slots, most_at_once
from shardwise.core.layouts.layout import I, S
from shardwise.core.mesh import PIPELINE, TENSOR
from shardwise.core.model_spec import ModelShape, ModelSpec, Operation
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import Tier
from shardwise.prediction.rank_shape import moments, stage_of, stages_on
from shardwise.prediction.stored_bytes import groups
from shardwise.prediction.technique_price import Price, Share
from shardwise.prediction.traffic import Counted, Tariff
from shardwise.techniques.recompute.price import PARTITIONED, added_operations, parts
from shardwise.techniques.recompute.price_host import tier_bytes


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


def _gradient_slots(plan: Plan, model: ModelShape) -> Slots:
    """The slots for gradients of a rank's part `model`; none with a pipeline."""
    if plan.pipeline is not None:
        return {}
    sizes: dict[str, list[int]] = {unit.name: [] for unit in model.units}
    for group in groups(plan, model):
        if group.moves.shards_gradient:
            sizes[group.unit.name].append(group.flat.padded * group.element_bytes)
    return gradient_slots([*sizes.values()], IN_FLIGHT)


def _sends(share: Share) -> Counted:
    plan, spec = share.plan, share.spec
    tariff, here = Tariff(plan, share.rank), stages_on(plan, share.rank)
    if not share.trains:
        return tariff.sent_bytes
    ranks = tariff.size(TENSOR)
    for run in spec.tensors.runs if spec.tensors else ():
        for part in parts(run.tape, spec.recomputed):
            padded = -(-part.numel // ranks) * ranks
            if stage_of(spec, part.module) in here:
                tariff.move(TENSOR, S(0), I, padded, part.element_bytes, "backward")
    for tape in spec.tapes:
        by_stage = tier_bytes(spec, tape, ranks, on_host=True)
        stored_bytes = sum(by_stage[stage] for stage in here)
        tariff.copy("device", "host", stored_bytes, "forward")
        tariff.copy("host", "device", stored_bytes, "backward")
    return tariff.sent_bytes


def _stores(share: Share, tier: Tier) -> Mapping[str, int]:
    """The arenas; activations are stored within a step alone."""
    if tier != "device" or not share.plan.arenas:
        return {}
    slots = kept_slots(share.spec, share.plan, share.rank)
    return {"buffers": sum(map(arena_bytes, (slots, _gradient_slots(share.plan, share.model))))}


def _spends(share: Share) -> Iterator[Operation]:
    return added_operations(share.spec.run.tape, share.spec.recomputed)


RECOMPUTE: Final = Price(_sends, _stores, spends=_spends)
