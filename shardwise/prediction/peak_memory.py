"""The most bytes that a step stores on a rank's device, but for temporary memory of kernels.

    between steps         parameters, gradients, optimizer, buffers (stored_bytes.py)
    kept                  activations that autograd keeps, and those fetched from the host
    recomputed            what the backward pass of a recomputed module computes again
    gathered              the units that the order of units keeps (unit_acts.py)
    gradients on the way  of units in backward, or being summed or copied
    summed gradients      of several microbatches, which leave the device with the last one

The parts are added up for each unit of the backward pass, and the largest sum is the peak:

    backward of unit k    kept by units 0 .. k, recomputed in k, and the most that is gathered and
                          of gradients on the way meanwhile, in the first or a later microbatch;
                          of one microbatch gradients of units k and later, for a step frees them

Under a pipeline, where several microbatches are on their way, the largest of each part is taken,
and all gradients, which are reduced at the end.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from shardwise.core.mesh import TENSOR
from shardwise.core.model_spec import ModelSpec
from shardwise.core.plan.plan import Plan
from shardwise.prediction.rank_shape import gathered_bytes_on
from shardwise.prediction.stored_bytes import Group, block_bytes, groups
from shardwise.prediction.unit_acts import UnitActs, by_unit, gathered_bytes, most_by_unit, order_on
from shardwise.techniques.recompute.price import Within, storages
from shardwise.techniques.recompute.price_step import pieces

if TYPE_CHECKING:
    from shardwise.prediction.prediction import Prediction

#: What a step of the tests' models stores at its peak, over the prediction: temporary memory of
#: kernels comes on top, and not all units are where the prediction has them.
LEAST: Final = 0.85
MOST: Final = 1.2


def device_peak_bytes(found: "Prediction") -> int:
    """The bytes that `found.rank` stores on its device in a step, at most, temporaries apart."""
    again, plan = _again(found.spec), found.plan
    lasting = sum(found.memory.values()) + found.fetched + _summed(found)
    every = by_unit(plan, found.model)
    gradients = [_on_the_way(unit, plan) for unit in every]
    if plan.pipeline is not None:
        most = max(again.values(), default=0) + gathered_bytes_on(
            found.spec, plan, found.model, found.rank
        )
        return lasting + found.activations + most + sum(gradients)
    acts, gathered = _acts(found, every), [gathered_bytes(unit) for unit in every]

    def stored() -> int:
        alive = (*acts.filling, *acts.reducing, *acts.leaving)
        own = sum(gathered[n] for n in acts.gathered) + sum(gradients[n] for n in alive)
        return own if acts.phase == "backward" else 0

    most, kept = most_by_unit(acts, stored), _kept(found)
    for microbatches in range(min(2, plan.microbatches), 0, -1):
        acts.microbatch(found.spec, sync=microbatches == 1)
    later = [_freed(unit) if plan.microbatches == 1 else 0 for unit in every]
    moments = [
        sum(kept[: k + 1]) + again.get(k, 0) + most.get(k, 0) - sum(later[:k])
        for k in range(len(kept))
    ]
    return lasting + max(moments, default=found.activations)


def _acts(found: "Prediction", every: Sequence[Sequence[Group]]) -> UnitActs:
    return UnitActs(order_on(found.plan, every, found.spec.modules, found.rank))


def _on_the_way(unit: Sequence[Group], plan: Plan) -> int:
    leaves = plan.microbatches == 1
    return sum(
        block_bytes(group, sharded=False)
        for group in unit
        if group.moves.shards_gradient or (leaves and group.moves.offload)
    )


def _freed(unit: Sequence[Group]) -> int:
    return sum(
        block_bytes(group, sharded=group.moves.shards_gradient)
        for group in unit
        if group.trained and not group.moves.offload
    )


def _summed(found: "Prediction") -> int:
    """The bytes of gradients that leave the device, from the first microbatch to the last one."""
    if found.plan.microbatches == 1:
        return 0
    return sum(
        block_bytes(group, sharded=group.moves.shards_gradient)
        for group in groups(found.plan, found.model)
        if group.moves.offload
    )


def _kept(found: "Prediction") -> list[int]:
    """By unit; a storage of several units is freed with the first, the last in backward."""
    place = places(found.spec)
    size, first = dict[object, int](), dict[object, int]()
    ranks = found.plan.mesh.size_of(TENSOR)
    for piece, moves in pieces(found.spec, found.spec.run.tape, ranks):
        if not moves:
            size[piece.key] = piece.stored_bytes
            first[piece.key] = min(
                place(piece.module), first.get(piece.key, len(found.model.units))
            )
    kept = [0] * len(found.model.units)
    for key, k in first.items():
        kept[k] += size[key]
    return kept


def _again(spec: ModelSpec) -> dict[int, int]:
    """The most bytes that a recomputed module of each unit keeps after it is computed again."""
    within, place = Within(spec.recomputed), places(spec)
    tape, kept = spec.run.tape, {key for key, _ in storages(spec.run.tape, spec.recomputed)}
    modules = Counter[str]()
    for name, storage in {*tape.saved}:
        outer = within(name)
        if outer is not None and storage not in kept:
            modules[outer] += tape.storage_bytes[storage]
    found: dict[int, int] = {}
    for name, count in modules.items():
        found[place(name)] = max(count, found.get(place(name), 0))
    return found


def places(spec: ModelSpec) -> Callable[[str], int]:
    """The number of the unit that a module is in; for the model and the loss the last one's."""
    units = {name: k for k, unit in enumerate(spec.modules) for name in unit.modules if name}
    within = Within(units)
    outer = {name.rpartition(".")[0]: k for name, k in reversed(units.items()) if "." in name}

    def place(name: str) -> int:
        inner = within(name)
        return units[inner] if inner is not None else outer.get(name, len(spec.modules) - 1)

    return place
