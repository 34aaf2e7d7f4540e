"""The kernels of context parallelism beside those of the model's own attention."""

from collections.abc import Iterator
from typing import Final

from shardwise.core.mesh import CONTEXT
from shardwise.core.model_spec import ModelSpec, Operation
from shardwise.core.plan.plan import Plan

#: Bytes of an element of the gradients that go round the ring.
SUM_BYTES: Final = {2: 4, 4: 4, 8: 8}


def ring_operations(spec: ModelSpec, plan: Plan, rank: int) -> Iterator[Operation]:
    """The kernels that the blocks of a ring add to one attention: sums of outputs and gradients."""
    place = plan.coordinate(rank).get(CONTEXT, 0)
    for call in (call for call in spec.run.rows if call.cut.ring.ranks > 1):
        ulysses = call.cut.ulysses
        here = call.cut.blocks(place // ulysses)[place % ulysses]
        size = SUM_BYTES[call.element_bytes]
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
