"""The bytes that an engine keeps between steps, by category, on one tier."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from shardwise.core.zero import Tier
from shardwise.engine.optimizer import Owned
from shardwise.techniques.data.flat_parameter import Flat

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

CATEGORIES = ("parameters", "gradients", "optimizer", "buffers")


def measured(engine: "Engine", tier: Tier = "device") -> dict[str, int]:
    """Live bytes on `tier` by category: parameters, gradients, optimizer, buffers (pool, arenas).

    Each storage is counted once, in the first category that holds it, with its current size:
    padding is included, freed storages are not.
    """
    seen: set[int] = set()
    found: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for category, _, tensor in owned(engine):
        storage = tensor.untyped_storage()
        if engine.world.tiers.of(tensor) == tier and storage._cdata not in seen:
            seen.add(storage._cdata)
            found[category] += storage.nbytes()
    return found


def owned(engine: "Engine") -> Iterator[Owned]:
    """Every tensor that an engine keeps between steps, with its category and flat group."""
    for flat in engine.flats:
        yield from (("parameters", flat, t) for t in (flat.full, flat.shard))
        yield from (("gradients", flat, t) for t in gradients_of(flat))
    yield from engine.optimizer.owns()
    buffers = (*engine.model.buffers(), engine.world.pool.memory, *engine.world.arenas.memory)
    yield from (("buffers", None, t) for t in buffers if t is not None)


def gradients_of(flat: Flat) -> list[Tensor]:
    """The memory of a flat parameter's gradients, on all tiers."""
    of = flat.grads
    every = of.grad, of.gshard, of.host_grad, of.other_host_grad
    return [t for t in every if t is not None]
