"""The bytes that a rank stores between two steps, by category.

    parameters   the row's column `param`: all of a group (R), or this rank's block (S)
    gradients    its column `grad`: all (P), or the block (S); their memory stays for the next step
    optimizer    its column `optim`, as in the table below
    buffers      those of the model, all on every rank; and the pool of communication buffers,
                 which the plan fixes (core/pool_size.py)

Padding is stored with parameters and gradients, and with the fp32 masters of 16-bit weights. The
optimizer's states have the shape of this rank's piece of each parameter: no padding there. With
Adam, of a group with K elements in pieces here and B in the block:

    fp32    4 B + 4 B + 8 K              bf16, fp16    2 B + 2 B + (4 B + 8 K)

What an offload stores elsewhere is priced in techniques/offload/price.py, and has masters in all
precisions; the device keeps parameters and buffers. With Adam:

    fp32    4 B + (4 B + 8 K)            bf16, fp16    2 B + (4 B + 8 K)

With `offload:param` parameters are elsewhere too. In 32 bits and more they are their own masters.

Adam has a step count of 4 bytes for each parameter. (ZeRO, arXiv 1910.02054, section 3.1, where
16-bit states take 2 + 2 + 12 bytes.)
"""

import math
from dataclasses import dataclass

from shardwise.core.model_spec import ModelShape
from shardwise.core.plan.plan import Plan
from shardwise.prediction.group import Group, groups

HALF = ("bfloat16", "float16")
MASTER_BYTES = 4


@dataclass(frozen=True)
class OptimizerShape:
    """An optimizer as numbers: state tensors the size of the weight, bytes a parameter besides.

    `factored`: also a mean for each row and each column of a matrix, and for each element of a
    vector (Adafactor, arXiv 1804.04235, section 3).
    """

    states: int
    scalar_bytes: int
    factored: bool = False


ADAM = OptimizerShape(states=2, scalar_bytes=4)
PLAIN = OptimizerShape(states=0, scalar_bytes=0)


def held_bytes(
    plan: Plan, model: ModelShape, optimizer: OptimizerShape = ADAM, rank: int = 0, pool: int = 0
) -> dict[str, int]:
    """The bytes `rank` holds on its device after a step with gradients of all trained parameters.

    `pool` is the size of its communication buffers, from the whole model (core/pool_size.py).
    """
    here = plan.coordinate(rank)
    found = groups(plan, model)
    updated = [group for group in found if group.trained and group.moves.offload is None]
    resting = [group for group in found if group.moves.fetch is None]
    return {
        "parameters": sum(
            block_bytes(group, sharded=group.row.param.kind == "S") for group in resting
        ),
        "gradients": sum(
            block_bytes(group, sharded=group.row.grad.kind == "S") for group in updated
        ),
        "optimizer": sum(
            optimizer_bytes(group, optimizer, here.get(group.layout.shard, 0)) for group in updated
        ),
        "buffers": sum(buffer.stored_bytes for buffer in model.buffers) + pool,
    }


def block_bytes(group: Group, *, sharded: bool) -> int:
    """The bytes of all of a group, or of this rank's block."""
    flat = group.flat
    return group.element_bytes * (flat.share if sharded else flat.padded)


def optimizer_bytes(group: Group, optimizer: OptimizerShape, place: int) -> int:
    """Masters of the block, if weights have 16 bits or are on another tier; states; scalars."""
    flat, half = group.flat, group.params[0].dtype in HALF
    element_bytes = MASTER_BYTES if half else group.element_bytes
    rank = place if group.shard > 1 else 0
    pieces = [flat.piece(index, rank) for index in range(len(group.params))]
    kept = sum(stop - start for start, stop in pieces)
    masters = element_bytes * flat.share if half or group.moves.publish is not None else 0
    states = optimizer.states * kept
    if optimizer.factored:
        states += sum(_means(param.shape) for param in group.params)
    return masters + element_bytes * states + optimizer.scalar_bytes * len(pieces)


def _means(shape: tuple[int, ...]) -> int:
    """The number of means that a factored optimizer keeps: one for each row and column."""
    if len(shape) < 2:
        return math.prod(shape)
    *outer, rows, columns = shape
    return math.prod(outer) * (rows + columns)
