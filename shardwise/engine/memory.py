"""The bytes that an engine keeps between steps, by category, on one tier."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from shardwise.comm.world import World
from shardwise.core.zero import Tier
from shardwise.engine.optimizer import Owned, ShardedOptimizer
from shardwise.parallel.data.flat_parameter import Flat

CATEGORIES = ("parameters", "gradients", "optimizer", "buffers")


def measured(
    model: nn.Module,
    flats: Sequence[Flat],
    optimizer: ShardedOptimizer,
    world: World,
    tier: Tier = "device",
) -> dict[str, int]:
    """Live bytes on `tier` by category: parameters, gradients, optimizer, buffers (pool, arenas).

    Each storage is counted once, in the first category that holds it, with its current size:
    padding is included, freed storages are not.
    """
    seen: set[int] = set()
    found: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for category, _, tensor in owned(model, flats, optimizer, world):
        if world.tiers.of(tensor) == tier:
            found[category] += _bytes(tensor, seen)
    return found


def owned(
    model: nn.Module, flats: Sequence[Flat], optimizer: ShardedOptimizer, world: World
) -> Iterator[Owned]:
    """Every tensor that an engine keeps between steps, with its category and flat group."""
    for flat in flats:
        yield from (("parameters", flat, t) for t in (flat.full, flat.shard))
        yield from (("gradients", flat, t) for t in gradients_of(flat))
    yield from optimizer.owns()
    buffers = (*model.buffers(), world.pool.memory, *world.arenas.memory)
    yield from (("buffers", None, t) for t in buffers if t is not None)


def gradients_of(flat: Flat) -> list[Tensor]:
    """The memory of a flat parameter's gradients, on all tiers."""
    of = flat.grads
    every = of.grad, of.gshard, of.host_grad, of.other_host_grad
    return [t for t in every if t is not None]


def _bytes(tensor: Tensor, seen: set[int]) -> int:
    """The bytes of its storage, unless that has been seen."""
    storage = tensor.untyped_storage()
    if storage._cdata in seen:
        return 0
    seen.add(storage._cdata)
    return storage.nbytes()
