"""The most bytes that a step stores on a rank's device, but for temporary memory of kernels.

    between steps         parameters, gradients, optimizer, buffers (memory.py)
    kept                  activations that autograd keeps, and those fetched from the host
    recomputed            what the backward pass of a recomputed module computes again
    gathered              three units: in use, ahead of it, and the one before
    gradients on the way  of four units: one that is filled, and three that are summed or copied,
                          of which one may be that of the same unit in the microbatch before
    summed gradients      of several microbatches, which leave the device with the last one

The parts are added up for each unit of the backward pass, and the largest sum is the peak:

    backward of unit k    kept by units 0 .. k, recomputed in k, gathered k-1 .. k+1 (or those
                          nearest to k that are gathered at all),
                          gradients of k .. k+3, and after the last unit of 0, 1, .. k, without
                          the units whose gradients stay

Under a pipeline, where several microbatches are on their way, the largest of each part is taken.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from shardwise.core.mesh import TENSOR
from shardwise.core.model_spec import ModelSpec
from shardwise.prediction.gathers import order_of
from shardwise.prediction.group import groups
from shardwise.techniques.recompute.price import Within, storages
from shardwise.techniques.recompute.price_host import pieces

if TYPE_CHECKING:
    from shardwise.prediction.prediction import Prediction

GATHERED_UNITS: Final = 3
GRADIENT_UNITS: Final = 4
#: What a step of the tests' models stores at its peak, over the prediction: temporary memory of
#: kernels comes on top, and not all units are where the prediction has them.
LEAST: Final = 0.85
MOST: Final = 1.2


def device_peak_bytes(found: "Prediction") -> int:
    """The bytes that `found.rank` stores on its device in a step, at most, temporaries apart."""
    gathered, gradients = Counter[str](), Counter[str]()
    for group in groups(found.plan, found.model):
        stored_bytes = group.flat.padded * group.element_bytes
        gathered[group.unit.name] += stored_bytes * group.moves.reshards
        leaves = group.moves.offload is not None and found.plan.microbatches == 1
        on_the_way = group.moves.shards_gradient or leaves
        gradients[group.unit.name] += stored_bytes * on_the_way
    again = _again(found.spec)
    lasting = sum(found.memory.values()) + found.fetched + _summed(found)
    if found.plan.pipeline is not None:
        return (
            lasting
            + found.activations
            + max(again.values(), default=0)
            + sum(count for _, count in gathered.most_common(GATHERED_UNITS))
            + max(gradients.values(), default=0)
            + sum(count for _, count in gradients.most_common(GRADIENT_UNITS - 1))
        )
    kept, names = _kept(found), [unit.name for unit in found.model.units]
    on_the_way = [gradients[name] for name in names]
    moments = [
        sum(kept[: k + 1])
        + again.get(k, 0)
        + _gathered_at([gathered[name] for name in names], k)
        + _gradients_at(on_the_way, k, found.plan.microbatches)
        for k in range(len(names))
    ]
    return lasting + max(moments, default=found.activations)


def gathered_most_bytes(found: "Prediction") -> dict[str, int]:
    """The most bytes that are gathered while each unit is used, forward or backward, by its name.

    Those of three units in the order of their use, and of units around others, which stay. Under ""
    the most at any moment. Not for pipelines, nor for units inside of recomputed modules, which a
    recomputation gathers all at once.
    """
    sizes = Counter[str]()
    for group in groups(found.plan, found.model):
        sizes[group.unit.name] += group.flat.padded * group.element_bytes * group.moves.reshards
    names, own = [unit.name for unit in found.model.units], found.spec.modules
    members = [k for k, name in enumerate(names) if sizes[name]]
    path = order_of(own, found.spec.run, members).path
    stay = {k for k in members if own[k].encloses}
    most = Counter[str]()
    for place, unit in enumerate(path):
        near = {*path[max(0, place - 1) : place - 1 + GATHERED_UNITS], *stay}
        stored_bytes = sum(sizes[names[k]] for k in near)
        most[names[unit]] = max(stored_bytes, most[names[unit]])
    return {**most, "": max(most.values(), default=0)}


def _gathered_at(sizes: Sequence[int], k: int) -> int:
    """The bytes of unit k and of the nearest on both sides that are gathered at all."""
    ahead = next((size for size in reversed(sizes[:k]) if size), 0)
    before = next((size for size in sizes[k + 1 :] if size), 0)
    return ahead + sizes[k] + before


def _gradients_at(sizes: Sequence[int], k: int, microbatches: int) -> int:
    """The bytes of the gradient of unit k, and of those before it in the backward pass.

    In each backward pass but the first, the last gradients of the one before are still summed.
    """
    passed = [*sizes] * min(2, microbatches)
    before = [size for size in passed[k + 1 : k + 1 + len(sizes)] if size]
    return sizes[k] + sum(before[: GRADIENT_UNITS - 1])


def _summed(found: "Prediction") -> int:
    """The bytes of gradients that leave the device, from the first microbatch to the last one."""
    if found.plan.microbatches == 1:
        return 0
    return sum(
        (group.flat.share if group.moves.shards_gradient else group.flat.padded)
        * group.element_bytes
        for group in groups(found.plan, found.model)
        if group.moves.offload
    )


def _kept(found: "Prediction") -> list[int]:
    """The bytes that autograd keeps until the backward pass of each unit has read them.

    A storage that several units keep is freed with the first of them, which is last in backward.
    """
    place = _places(found.spec)
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
    within, place = Within(spec.recomputed), _places(spec)
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


def _places(spec: ModelSpec) -> Callable[[str], int]:
    """The number of the unit that a module is in; for the model and the loss the last one's."""
    units = {name: k for k, unit in enumerate(spec.modules) for name in unit.modules if name}
    within = Within(units)
    outer = {name.rpartition(".")[0]: k for name, k in reversed(units.items()) if "." in name}

    def place(name: str) -> int:
        inner = within(name)
        return units[inner] if inner is not None else outer.get(name, len(spec.modules) - 1)

    return place
