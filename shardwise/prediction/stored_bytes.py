"""The bytes that a rank stores between two steps, by category, and flat parameters as numbers.

    parameters   the row's column `param`: all of a group (R), or this rank's block (S)
    gradients    its column `grad`: all (P), or the block (S); their memory stays for the next step
    optimizer    its column `optim`, as in the table below
    buffers      of the model, all on every rank; and the pool of communication buffers,
                 which the plan fixes (core/buffer_sizes.py)

A unit has one group for each pair of element type and trainability.  A group that is neither
trained nor sharded never changes, so it is not split into blocks.  Padding is stored with
parameters and gradients, and with the fp32 masters of 16-bit weights.  Where an optimizer needs
whole tensors, one rank has the states of all of a parameter: its owner.  Others have states of
runs, from the first element to the last of parameters that are updated as one tensor
(memory_optimizer.py).  With Adam, of a group with K elements in runs here and B in the block:

    fp32    4 B + 4 B + 8 K              bf16, fp16    2 B + 2 B + (4 B + 8 K)

What an offload stores elsewhere is priced in techniques/offload/price.py, and has masters in all
precisions; the device keeps parameters and buffers.  With Adam:

    fp32    4 B + (4 B + 8 K)            bf16, fp16    2 B + (4 B + 8 K)

With `offload:param` parameters are elsewhere too.  In 32 bits and more they are their own masters.
Adam has a step count of 4 bytes for each run.  A parameter that gets no gradient has no state, but
it has a gradient's memory and a master; then each of the others in its flat parameter is a run.
(ZeRO, arXiv 1910.02054, section 3.1, where 16-bit states take 2 + 2 + 12 bytes.)
"""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from shardwise.core.layouts.flatten import Flattening, flatten
from shardwise.core.layouts.param_layout import Layout
from shardwise.core.layouts.uneven import owners
from shardwise.core.model_spec import ModelShape, ParamShape, UnitShape
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import Row, RowMoves

# --- flat parameters as numbers -------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Parameters of one element type and layout, all trained or all frozen.
    `moves` are the row's in a step; over `shard` ranks the parameters are split.
    """

    unit: UnitShape
    params: tuple[ParamShape, ...]
    layout: Layout
    moves: RowMoves
    shard: int

    @property
    def row(self) -> Row:
        return self.layout.row

    @property
    def trained(self) -> bool:
        return self.params[0].trainable

    @property
    def element_bytes(self) -> int:
        return self.params[0].element_bytes

    @cached_property
    def flat(self) -> Flattening:
        return flatten([param.numel for param in self.params], self.element_bytes, self.shard)


def groups(plan: Plan, model: ModelShape) -> list[Group]:
    """The groups of every unit, in order."""
    found: list[Group] = []
    for unit in model.units:
        by_layout: dict[Hashable, list[ParamShape]] = {}
        for param in unit.params:
            layout = layout_of(plan, param)
            alone = param.name if layout.tied else ""
            key = param.dtype, param.trainable, layout.kind, alone
            by_layout.setdefault(key, []).append(param)
        for params in by_layout.values():
            layout = layout_of(plan, params[0])
            shard, replicate = plan.size_of(layout.shard), plan.size_of(layout.replicate)
            moves = layout.row.moves(shard, replicate, trained=params[0].trainable)
            found.append(Group(unit, tuple(params), layout, moves, shard if moves.split else 1))
    return found


def layout_of(plan: Plan, param: ParamShape) -> Layout:
    """The parameter's own layout, or that of the plan's row."""
    axes = plan.shard_axis or "none", plan.replicate_axis or "none"
    return param.layout or Layout(plan.states, *axes)


HALF = ("bfloat16", "float16")
MASTER_BYTES = 4
NOBODY = -1  # the owner of a parameter without gradients


@dataclass(frozen=True)
class OptimizerShape:
    """An optimizer as numbers: state tensors the size of the weight, bytes a parameter besides.

    factored  also a mean for each row and each column of a matrix, and for each element of a vector
              (Adafactor, arXiv 1804.04235, section 3)
    whole     one of the ranks that shard a parameter, its owner, has the states of all of it
    others    parameters, by name, of other groups, by their numbers
    """

    states: int
    scalar_bytes: int
    factored: bool = False
    whole: bool = False
    group: int = 0
    others: "tuple[tuple[str, OptimizerShape], ...]" = ()

    @cached_property
    def _by_name(self) -> "dict[str, OptimizerShape]":
        return dict(self.others)

    def of(self, name: str) -> "OptimizerShape":
        return self._by_name.get(name, self)


ADAM = OptimizerShape(states=2, scalar_bytes=4)
PLAIN = OptimizerShape(states=0, scalar_bytes=0)


def held_bytes(
    plan: Plan,
    model: ModelShape,
    optimizer: OptimizerShape = ADAM,
    rank: int = 0,
    pool: int = 0,
    unused: Collection[str] = (),
) -> dict[str, int]:
    """The bytes `rank` holds on its device after a step, in which parameters `unused` had no use.
    `pool` is the size of its communication buffers, from the whole model (core/buffer_sizes.py).
    """
    here = plan.coordinate(rank)
    found = groups(plan, model)
    owned = owners_of(found, optimizer) | dict.fromkeys(unused, NOBODY)
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
            optimizer_bytes(group, optimizer, here.get(group.layout.shard, 0), owned)
            for group in updated
        ),
        "buffers": sum(buffer.stored_bytes for buffer in model.buffers) + pool,
    }


def block_bytes(group: Group, *, sharded: bool) -> int:
    flat = group.flat
    return group.element_bytes * (flat.share if sharded else flat.padded)


def owners_of(found: Sequence[Group], optimizer: OptimizerShape) -> dict[str, int]:
    """The owner, a rank on its shard axis, of each parameter that is split but updated whole."""
    numels = dict[tuple[str, int], dict[str, int]]()
    for group in (group for group in found if group.trained and group.shard > 1):
        own = {p.name: p.numel for p in group.params if optimizer.of(p.name).whole}
        numels.setdefault((group.layout.shard, group.shard), {}).update(own)
    return {name: at for (_, n), own in numels.items() for name, at in owners(own, n).items()}


def optimizer_bytes(
    group: Group, optimizer: OptimizerShape, place: int, owned: Mapping[str, int]
) -> int:
    """Masters of the block, if weights have 16 bits or are on another tier; states; scalars.
    `owned`: the owners of parameters updated as a whole, NOBODY if not updated.
    """
    flat = group.flat
    element_bytes = master_bytes(group)
    rank = place if group.shard > 1 else 0
    apart = group.params[0].dtype in HALF or group.moves.publish is not None
    total = element_bytes * flat.share if apart else 0
    shapes = [optimizer.of(param.name) for param in group.params]
    alone = any(s.whole or p.name in owned for s, p in zip(shapes, group.params, strict=True))
    key = range(len(shapes)).__getitem__ if alone else shapes.__getitem__
    for _, run in groupby(range(len(shapes)), key):
        first, *others = run
        last = others[-1] if others else first
        shape, param = shapes[first], group.params[first]
        start, stop = flat.piece(first, rank)[0], flat.piece(last, rank)[1]
        if param.name in owned:
            start, stop = 0, param.numel
        if owned.get(param.name, rank) == rank:
            kept = shape.states * (stop - start) + shape.factored * _means(param.shape)
            total += element_bytes * kept + shape.scalar_bytes
    return total


def master_bytes(group: Group) -> int:
    return MASTER_BYTES if group.params[0].dtype in HALF else group.element_bytes


def _means(shape: tuple[int, ...]) -> int:
    if len(shape) < 2:
        return math.prod(shape)
    *outer, rows, columns = shape
    return math.prod(outer) * (rows + columns)
