"""What the words of a plan promise, by the closed forms of the papers.

Run and prediction read the same tables: the states of a row, the units of an offload, the actions
of a schedule, the recomputed blocks, the size of the pool. A wrong entry changes both alike. So
what these words promise is compared with what the engine has:

    zero1, zero2, zero3     bytes of parameters, gradients and optimizer state: of N parameters all,
                            or 1/n on each of n ranks (ZeRO, arXiv 1910.02054, figure 1)
    offload:optim=F,disk=G  the fraction of the parameters whose states leave the device, or are on
                            a disk: F and G, and at most one unit more
    1f1b:M and others       activations of so many microbatches at once (core/schedule/library.py)
    recompute:full, everyN  all blocks, or every N-th one
    buffers:SIZE            the bytes of the pool
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from torch import nn

from shardwise.core.plan import Plan
from shardwise.core.plan_parser import PARTITIONED_WORDS, recompute_every
from shardwise.core.schedule.library import allowed, entry
from shardwise.core.schedule.memory import peaks
from shardwise.engine.engine import Engine
from shardwise.parallel.data.flat_parameter import Flat
from shardwise.parallel.data.units import Unit
from shardwise.parallel.recompute.checkpointed import FULL, SELECTIVE

#: By row: whether parameters, gradients and optimizer state are sharded.
SHARDED: Final[Mapping[str, tuple[bool, bool, bool]]] = {
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
}
#: Bytes of AdamW's state for each element of a parameter of so many bytes.
STATE_BYTES: Final = {2: 12, 4: 8, 8: 16}
#: The relative difference that padding and step counts may cause, and the bytes of such a count.
SLACK, COUNT_BYTES = 0.25, 8

#: By name: as read, and as promised.
Promises = dict[str, tuple[int, int]]


def broken(engine: Engine) -> Promises:
    """The promises of the plan that this rank of `engine` does not keep, between two steps."""
    plan, found = engine.plan, dict[str, tuple[int, int]]()
    if plan.offloaded is None:
        found |= _states(engine)
    else:
        offload = plan.offloaded
        found |= _offloaded(engine.data.units.order, offload.share, offload.disk_share)
    if plan.buffers_bytes and engine.world.pool.memory is not None:
        found |= _unequal("pool", engine.world.pool.memory.nbytes, plan.buffers_bytes)
    if engine.staging is not None:
        name, size = allowed(plan.pipeline or "", engine.staging.axis.size)
        rank = engine.staging.axis.rank
        read, theory = peaks(engine.staging.schedule)[rank], entry(name).tapes(size)[rank]
        found |= _unequal("activations at once", int(read), theory)
    if plan.recompute is not None and not plan.layers and engine.staging is None:
        found |= _recomputed(engine, plan.recompute)
    return found


def _unequal(name: str, read: int, theory: int) -> Promises:
    return {} if read == theory else {f"{name}, as the plan's words": (read, theory)}


def _states(engine: Engine) -> Promises:
    """The states of the rows of the plan and of its layers."""
    theory, counts = [0.0, 0.0, 0.0], sum(len(flat.params) for flat in engine.flats)
    for flat in engine.flats:
        nbytes = flat.plan.padded * flat.shard.element_size()
        optim = flat.plan.padded * STATE_BYTES[flat.shard.element_size()]
        every = nbytes, nbytes * flat.trained, optim * flat.trained
        sharded = _sharded(engine.plan, flat)
        for k, (whole, cut) in enumerate(zip(every, sharded, strict=True)):
            theory[k] += whole / (flat.shard_axis.size if cut else 1)
    read, found = engine.memory(), dict[str, tuple[int, int]]()
    for name, wanted in zip(("parameters", "gradients", "optimizer"), theory, strict=True):
        if abs(read[name] - wanted) > SLACK * wanted + COUNT_BYTES * counts:
            found |= _unequal(name, read[name], round(wanted))
    return found


def _recomputed(engine: Engine, what: str) -> Promises:
    """The recomputed blocks in each list of modules."""
    if not (every := recompute_every(what)) and what not in (FULL, SELECTIVE, *PARTITIONED_WORDS):
        return {}
    chosen: dict[str, list[nn.Module]] = defaultdict(list)
    for name in engine.recompute.kinds:
        chosen[name.rpartition(".")[0]].append(engine.model.get_submodule(name))
    found: Promises = {}
    for parent, modules in chosen.items():
        kinds = {type(module) for module in modules}
        blocks = sum(type(one) in kinds for one in engine.model.get_submodule(parent).children())
        found |= _unequal(
            f"recomputed blocks of {parent}", len(modules), -(-blocks // (every or 1))
        )
    return found


def _sharded(plan: Plan, flat: Flat) -> tuple[bool, ...]:
    row = plan.of_layers(plan.layer_of(flat.names[0])).row
    columns = row.removeprefix("row:").split(",")
    return SHARDED.get(row) or tuple(column == "S" for column in columns)


def _offloaded(units: Sequence[Unit], share: float, disk_share: float) -> Promises:
    """The elements whose states leave the device, and those on a disk."""
    numels = [
        sum(shape.numel() for flat in unit.trained for shape in flat.shapes) for unit in units
    ]
    moves = [[flat.moves for flat in unit.trained] for unit in units]
    found: Promises = {}
    for name, fraction, left in (
        ("host or disk", share, [any(one.host_update for one in own) for own in moves]),
        ("disk", disk_share, [any(one.on_disk for one in own) for own in moves]),
    ):
        read = sum(n for n, is_left in zip(numels, left, strict=True) if is_left)
        least = math.floor(fraction * sum(numels))
        if not least <= read <= (least + max(numels, default=0) if fraction else 0):
            found |= _unequal(f"elements with states on {name}", read, least)
    return found
