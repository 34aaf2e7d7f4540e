"""The bytes that an engine keeps between steps, by category: measured and predicted."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from shardwise.engine.spec import model_shape, optimizer_shape
from shardwise.predict.memory import PLAIN, held_bytes

CATEGORIES = ("parameters", "gradients", "optimizer", "buffers")


def measured(engine: Any) -> dict[str, int]:
    """Live bytes by category: parameters, gradients, optimizer, buffers.

    Each storage is counted once and in the first category that holds it, as large as it is now:
    padding and pieces that views do not show are included, freed storages are not. Where a schedule
    updates by itself, `versions` is the peak of the last step (weight_stashing.py).
    """
    seen: set[int] = set()
    found: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for category, tensor in owned(engine):
        found[category] += _bytes([tensor], seen)
    stale = getattr(engine.passes, "stale", None)
    return found if stale is None else found | {"versions": stale.peak_bytes}


def owned(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that an engine keeps between steps, with its category."""
    kept: list[Tensor] = []
    engine.optimizer.map_state(kept.append)
    for flat in engine.flats:
        yield from (("parameters", t) for t in (flat.full, flat.shard))
        yield from (("gradients", t) for t in (flat.grad, flat.gshard) if t is not None)
    yield from (("optimizer", t) for t in kept)
    yield from (("buffers", t) for t in engine.model.buffers())


def predicted(engine: Any) -> dict[str, int]:
    """The same categories by formula, after a step that gave every trained parameter a gradient."""
    dtypes = [f.dtype for f in engine.optimizer.flats]
    keeps = optimizer_shape(engine.training.optimizer, dtypes[0]) if dtypes else PLAIN
    return held_bytes(engine.plan, model_shape(engine), keeps, engine.world.rank)


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for t in tensors:
        storage = t.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total
