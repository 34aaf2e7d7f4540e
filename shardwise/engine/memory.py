"""The bytes that an engine owns, by category, on one tier: the table of memory as tensors."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from shardwise.core.zero import CATEGORIES, GATHERED, OWNED, PART_OF, Tier, by_tier
from shardwise.engine.optimizer.optimizer import Owned
from shardwise.flat.flat_parameter import Flat

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine


def measured(engine: "Engine", tier: Tier = "device") -> dict[str, int]:
    """Live bytes on `tier` by category between steps, and the last step's `versions`."""
    parts, found = in_step(engine, tier), dict.fromkeys(CATEGORIES, 0)
    for name in OWNED:
        found[PART_OF.get(name, name)] += parts.pop(name)
    return found | parts


def resting(engine: "Engine") -> dict[str, int]:
    """The same on all tiers, under names such as "optimizer on the host"."""
    return by_tier(*(measured(engine, tier) for tier in ("device", "host", "disk")))


def in_step(engine: "Engine", tier: Tier = "device") -> dict[str, int]:
    """The same at any moment: what is gathered apart from parameters.
    Each storage is counted once, in the first category that holds it, with its current size:
    padding is included, freed storages are not.
    """
    seen: set[int] = set()
    found: dict[str, int] = dict.fromkeys(OWNED, 0)
    for category, _, tensor in owned(engine):
        storage = tensor.untyped_storage()
        if engine.world.tiers.of(tensor) == tier and storage._cdata not in seen:
            seen.add(storage._cdata)
            found[category] += storage.nbytes()
    stale = engine.passes.stale if tier == "device" else None
    return found if stale is None else found | {"versions": stale.peak_bytes}


def owned(engine: "Engine") -> Iterator[Owned]:
    """Every tensor that an engine owns, with its category and flat group."""
    for flat in engine.flats:
        yield from ((category, flat, t) for category, t in weights_of(flat))
        yield from (("gradients", flat, t) for t in gradients_of(flat))
    for p in engine.data.on_grads.arrived:
        if p.grad is not None:
            yield "gradients", engine.data.places[p][1], p.grad
    yield from engine.optimizer.owns()
    buffers = (*engine.model.buffers(), engine.world.pool.memory, *engine.world.arenas.memory)
    yield from (("buffers", None, t) for t in buffers if t is not None)


def weights_of(flat: Flat) -> tuple[tuple[str, Tensor], ...]:
    return (GATHERED if flat.reshards else "parameters", flat.full), ("parameters", flat.shard)


def gradients_of(flat: Flat) -> list[Tensor]:
    of = flat.grads
    every = of.grad, of.gshard, of.host_grad, of.other_host_grad
    return [t for t in every if t is not None]
