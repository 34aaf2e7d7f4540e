"""What recomputation sends and stores: gathered inputs, copies to the host, and arenas.

The arenas of a rank have slots, counted with the buffers (comm/tiers/arena.py):

    kept         of each recomputed module, the inputs that a gradient reaches, or this rank's part
                 of them; for every microbatch that its stage keeps at once
    gradients    under zero2 and zero3, of the units that are computed or reduced at once

Activations in host memory (host_activations.py):

    rests on the host     each storage of at least 1 KiB that a block keeps: all that autograd saves
                          in its forward, or what recomputation keeps of it
    copied                each storage, once to the host in forward and once back in backward
    fetched at once       the storages of two neighbouring blocks; one that several blocks read
                          stays from the last of them to the first
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from shardwise.core.buffer_sizes import IN_FLIGHT, Slots, arena_bytes, gradient_slots, most_at_once
from shardwise.core.layouts.layout import I, S
from shardwise.core.mesh import PIPELINE, TENSOR
from shardwise.core.model_spec import SMALL_BYTES, ModelShape, ModelSpec, Operation, Tape
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import Tier
from shardwise.prediction.rank_shape import moments, stage_of, stages_on
from shardwise.prediction.stored_bytes import groups
from shardwise.prediction.traffic import Counted, Price, Share, Tariff
from shardwise.techniques.recompute.price import (
    PARTITIONED,
    Within,
    added_operations,
    parts,
    storages,
)


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
    """The slots for gradients; none with a pipeline."""
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
    ranks = tariff.size(TENSOR)
    for run in spec.tensors.runs if spec.tensors else ():
        for part in parts(run.tape, spec.recomputed):
            padded = -(-part.numel // ranks) * ranks
            if stage_of(spec, part.module) in here:
                tariff.move(TENSOR, S(0), I, padded, part.element_bytes, "backward")
    for tape in spec.tapes:
        stored_bytes = host_bytes(spec, tape, ranks, here)
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

# --- Activations in host memory -------------------------------------------------------------------


def host_bytes(spec: ModelSpec, tape: Tape, ranks: int, stages: Collection[int]) -> int:
    """The bytes that one microbatch of these stages keeps on the host."""
    within = Within(spec.on_host)
    kept: dict[tuple[object, int], int] = {}  # by storage, or part of an argument, and stage
    for storage, module in storages(tape, spec.recomputed, arenas=spec.arenas):
        stored_bytes, block = tape.storage_bytes[storage], within(module)
        moves = block is not None and spec.recomputed.get(block) != PARTITIONED
        if moves and stored_bytes >= SMALL_BYTES:
            kept[storage, stage_of(spec, module)] = stored_bytes
    for part in () if spec.arenas else parts(tape, spec.recomputed):
        stored_bytes = -(-part.numel // ranks) * part.element_bytes
        if within(part.module) is not None and stored_bytes >= SMALL_BYTES:
            kept[(part.module, part.storage), stage_of(spec, part.module)] = stored_bytes
    return sum(stored_bytes for (_, stage), stored_bytes in kept.items() if stage in stages)
