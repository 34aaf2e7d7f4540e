"""The bytes that an engine keeps between steps, by category, on one tier."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from shardwise.comm.world import World
from shardwise.core.zero import Tier
from shardwise.engine.optimizer import ShardedOptimizer
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
    for category, tensor in owned(model, flats, optimizer, world):
        if world.tiers.of(tensor) == tier:
            found[category] += _bytes([tensor], seen)
    return found


def owned(
    model: nn.Module, flats: Sequence[Flat], optimizer: ShardedOptimizer, world: World
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that an engine keeps between steps, with its category."""
    kept: list[Tensor] = []
    optimizer.map_state(kept.append)
    for flat in flats:
        yield from (("parameters", t) for t in (flat.full, flat.shard))
        yield from (("gradients", t) for t in gradients_of(flat))
    yield from (("optimizer", t) for t in kept)
    yield from (("buffers", disk.disk.memory) for disk in (optimizer.disk,) if disk)
    yield from (("buffers", t) for t in (*model.buffers(), world.pool.memory) if t is not None)
    yield from (("buffers", t) for t in world.arenas.memory)


def gradients_of(flat: Flat) -> list[Tensor]:
    """The memory of a flat parameter's gradients, on all tiers."""
    of = flat.grads
    every = of.grad, of.gshard, of.host_grad, of.other_host_grad
    return [t for t in every if t is not None]


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for t in tensors:
        storage = t.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total
