"""The bytes of context parallelism: keys and values round the ring, or heads by all-to-all.

The formulas stand in ring.py and attention.py, with the positions t_r that each rank holds. A
recomputed module sends again what its forward pass sends. The ranks count the labels of each loss
together, in 8 bytes.
"""

from collections.abc import Iterator
from typing import Final

from shardwise.comm.ledger import Key
from shardwise.core.layouts.layout import R, S
from shardwise.core.mesh import CONTEXT as AXIS
from shardwise.core.mesh import PIPELINE
from shardwise.core.model_spec import ModelSpec, Operation
from shardwise.prediction.rank_shape import stage_of, stages_on
from shardwise.prediction.traffic import CONSENSUS_BYTES, Counted, Price, Share, Tariff
from shardwise.techniques.context.positions import AttentionCall, LossCount

#: Bytes of an element of the gradients that go round the ring.
_SUMS: Final = {2: 4, 4: 4, 8: 8}


def _sends(share: Share) -> Counted:
    plan, spec = share.plan, share.spec
    tariff, here = Tariff(plan, share.rank), stages_on(plan, share.rank)
    place = tariff.coordinates[AXIS]
    ends = plan.mesh.size_of(PIPELINE) == 1 or spec.stages is None or spec.stages.number - 1 in here
    for call in (call for each in spec.row_gathers if plan.cp > 1 for call in each):
        if isinstance(call, LossCount) and ends:
            tariff.move(AXIS, S(0), R, plan.cp, CONSENSUS_BYTES, "forward")
        elif isinstance(call, AttentionCall) and stage_of(spec, call.layer) in here:
            _attention(tariff, call, place, again=_repeats(spec, call))
    return tariff.sent_bytes


def _repeats(spec: ModelSpec, call: AttentionCall) -> bool:
    return any(f"{call.layer}.".startswith(f"{module}.") for module in spec.recomputed)


def _attention(tariff: Tariff, call: AttentionCall, place: int, *, again: bool) -> None:
    phases = ["forward", *["backward"] * again]
    for phase in phases:
        for kind, sent in _forward(call, place):
            tariff.add(Key(AXIS, kind, phase), sent)
    for kind, sent in _backward(call, place) if call.trained else ():
        tariff.add(Key(AXIS, kind, "backward"), sent)


def _forward(call: AttentionCall, place: int) -> Iterator[tuple[str, int]]:
    size = call.element_bytes
    yield from _ring(call, place, size, own=False)
    if call.cut.ulysses > 1:
        here, every, away = _ulysses(call, place)
        yield "all_to_all", here * _heads(call) * away * size // call.cut.ulysses
        yield (
            "all_to_all",
            (every - here) * call.heads * call.rows * call.width * size // (call.cut.ulysses),
        )
        ranks = call.cut.ulysses
        if call.mask_heads > 1:
            yield "all_to_all", here * call.mask_heads * call.mask_bytes * (ranks - 1) // ranks
        else:  # padded to the most positions of a rank
            widest = max(call.cut.blocks(place // ranks))
            yield "all_gather", widest * call.mask_bytes * (ranks - 1)


def _backward(call: AttentionCall, place: int) -> Iterator[tuple[str, int]]:
    size = call.element_bytes
    yield from _ring(call, place, size, own=False)
    yield from _ring(call, place, _SUMS[size], own=True)
    if call.cut.ulysses > 1:
        here, every, away = _ulysses(call, place)
        yield "all_to_all", here * call.heads * away * size // call.cut.ulysses
        yield (
            "all_to_all",
            (every - here) * _heads(call) * call.rows * call.width * size // (call.cut.ulysses),
        )


def _heads(call: AttentionCall) -> int:
    return call.heads + 2 * max(call.key_heads, call.cut.ulysses)


def _ulysses(call: AttentionCall, place: int) -> tuple[int, int, int]:
    """The positions of this rank and of its group, and elements to other ranks for each head."""
    ranks = call.cut.ulysses
    counts = call.cut.blocks(place // ranks)
    return counts[place % ranks], sum(counts), (ranks - 1) * call.rows * call.width


def _ring(call: AttentionCall, place: int, size: int, *, own: bool) -> Iterator[tuple[str, int]]:
    """All blocks but that of the next rank; `own`: but this rank's, which is its gradients'."""
    ring, ranks = call.cut.ring, call.cut.ulysses
    if ring.ranks == 1:
        return
    heads = call.key_heads if ranks == 1 else max(call.key_heads, ranks) // ranks
    place //= ranks
    left = place if own else (place + 1) % ring.ranks
    positions = call.cut.length - ring.numel(left)
    yield "send", 2 * call.rows * heads * call.width * positions * size


def _spends(share: Share) -> Iterator[Operation]:
    """The kernels that the blocks of a ring add to one attention: sums of outputs and gradients."""
    place = share.plan.coordinate(share.rank).get(AXIS, 0)
    for call in next(iter(share.spec.row_gathers), ()):
        if not isinstance(call, AttentionCall) or call.cut.ring.ranks == 1:
            continue
        here, size = _ulysses(call, place)[0], _SUMS[call.element_bytes]
        lse_bytes = call.rows * call.heads * here * size
        out_bytes, kv_bytes = lse_bytes * call.width, 2 * lse_bytes * call.width
        # block.merge: eight kernels on lse, three on out; a block's kernel starts
        forward = [3 * lse_bytes] * 8 + [3 * out_bytes] * 3 + [lse_bytes]
        # gradients of q are added, those of k and v stacked and added; a block's kernel starts
        backward = [3 * out_bytes, 2 * kv_bytes, 3 * kv_bytes, lse_bytes]
        dtype = "float64" if size == 8 else "float32"
        for _ in range(call.cut.ring.ranks):
            for moved_bytes in forward:
                yield Operation(call.layer, False, dtype, 0, 0, moved_bytes)
            for moved_bytes in backward if call.trained else ():
                yield Operation(call.layer, True, dtype, 0, 0, moved_bytes)


CONTEXT: Final = Price(_sends, spends=_spends)
