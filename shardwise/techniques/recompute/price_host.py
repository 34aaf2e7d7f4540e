"""Activations in host memory: the bytes that rest there, are copied, and are fetched at once.

    rests on the host     each storage of at least 1 KiB that a block keeps: all that autograd saves
                          in its forward, or what recomputation keeps of it (recompute.py)
    copied                each storage, once to the host in forward and once back in backward
    fetched at once       the storages of two neighbouring blocks; those that several blocks read
                          stay from the last of these to the first

The rest of `activations` stays on the device (techniques/recompute/host_activations.py).
"""

from collections.abc import Iterator
from typing import NamedTuple

from shardwise.core.mesh import TENSOR
from shardwise.core.model_spec import SMALL_BYTES, ModelSpec, Tape
from shardwise.core.plan.plan import Plan
from shardwise.prediction.rank_shape import moments, stage_of, stages_on
from shardwise.techniques.recompute.price import PARTITIONED, Within, parts, storages


class KeptPiece(NamedTuple):
    """A kept storage by its number, or this rank's part of an argument; and its module."""

    key: object
    stored_bytes: int
    module: str


def pieces(spec: ModelSpec, tape: Tape, ranks: int) -> Iterator[tuple[KeptPiece, bool]]:
    """The kept pieces of a microbatch, maybe repeated for a module, and whether on the host."""
    within = Within(spec.on_host)
    for storage, module in storages(tape, spec.recomputed, arenas=spec.arenas):
        piece, block = KeptPiece(storage, tape.storage_bytes[storage], module), within(module)
        moves = block is not None and spec.recomputed.get(block) != PARTITIONED
        yield piece, moves and piece.stored_bytes >= SMALL_BYTES
    for part in () if spec.arenas else parts(tape, spec.recomputed):
        stored_bytes = -(-part.numel // ranks) * part.element_bytes
        moves = within(part.module) is not None and stored_bytes >= SMALL_BYTES
        yield KeptPiece((part.module, part.storage), stored_bytes, part.module), moves


def tier_bytes(spec: ModelSpec, tape: Tape, ranks: int, *, on_host: bool) -> dict[int, int]:
    """The bytes that one microbatch keeps on a tier in each stage, each storage once."""
    found = dict.fromkeys(range(spec.stages.number if spec.stages else 1), 0)
    kept = [piece for piece, moves in pieces(spec, tape, ranks) if moves == on_host]
    by_key = {(piece.key, stage_of(spec, piece.module)): piece.stored_bytes for piece in kept}
    for (_, stage), stored_bytes in by_key.items():
        found[stage] += stored_bytes
    if spec.on_host and not on_host:  # the runtime keeps the tensors that a stage received
        for stage, received in enumerate(spec.stages.bundles[0] if spec.stages else (), 1):
            sizes = (x.numel * x.element_bytes for x in received)
            found[stage] += sum(size for size in sizes if size >= SMALL_BYTES)
    return found


def kept_bytes(spec: ModelSpec, plan: Plan, rank: int, *, on_host: bool) -> int:
    """The most bytes of activations that `rank` keeps at once on the device, or on the host."""
    by_stage = tier_bytes(spec, spec.run.tape, plan.mesh.size_of(TENSOR), on_host=on_host)
    every = moments(plan, plan.mesh.coordinate(rank).get("pp", 0))
    return max(sum(n * by_stage[stage] for stage, n in moment.items()) for moment in every)


def fetched_bytes(spec: ModelSpec, plan: Plan, rank: int) -> int:
    """The most bytes that are fetched to the device of `rank` at once, for the first microbatch.

    A storage is fetched with the last block that reads it, or one block earlier, and freed after
    the backward pass of the first block that reads it.
    """
    here, within = stages_on(plan, rank), Within(spec.on_host)
    order = {name: place for place, name in enumerate(spec.on_host)}
    sizes, readers = dict[tuple[int, object], int](), dict[tuple[int, object], list[int]]()
    for piece, moves in pieces(spec, spec.run.tape, plan.mesh.size_of(TENSOR)):
        stage, block = stage_of(spec, piece.module), within(piece.module)
        if moves and block is not None and stage in here:
            sizes[stage, piece.key] = piece.stored_bytes
            readers.setdefault((stage, piece.key), []).append(order[block])
    most = 0
    for stage in here:
        own = {key: found for key, found in readers.items() if key[0] == stage}
        places = sorted({place for found in own.values() for place in found})
        for first, now in zip([*places[:1], *places], places, strict=False):
            back = (k for k, found in own.items() if max(found) >= first and min(found) <= now)
            most = max(most, sum(sizes[key] for key in back))
    return most
