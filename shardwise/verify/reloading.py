"""Saving a run's checkpoint and loading it into another engine."""

import shutil
import tempfile
from pathlib import Path
from typing import Final

import torch

from shardwise.checkpoint import engines
from shardwise.comm.move import all_gather_object
from shardwise.comm.world import World
from shardwise.core.errors import bad
from shardwise.engine.engine import Engine

#: The value of every weight before a load.
FORGOTTEN: Final = 0.5


def reload_engine(saved: Engine, fresh: Engine) -> Engine:
    """Save `saved` to a temporary folder, and load it into `fresh`. Called by all ranks. All
    weights of `fresh` are overwritten before: it has the seed of `saved`.
    """
    _forget(fresh)
    world = saved.world
    folder = _shared_folder(world)
    try:
        engines.save(saved, folder)
        engines.load(fresh, folder)
        world.barrier()
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return fresh


def _shared_folder(world: World) -> Path:
    """A temporary folder that all ranks see: the host's own, or one in the current folder."""
    for place in (None, Path.cwd()):
        own = tempfile.mkdtemp(prefix="shardwise-verify-", dir=place) if world.rank == 0 else ""
        folder = Path(all_gather_object(own, world)[0])
        if all(all_gather_object(folder.is_dir(), world)):
            return folder
        world.barrier()
        if world.rank == 0:
            folder.rmdir()
    raise bad(
        "a proof on several hosts, which see neither each other's temporary folder nor one here",
        "a folder that all hosts share, for a checkpoint of the model",
        "export TMPDIR=/a/shared/folder on rank 0, or the command in a shared folder",
    )


@torch.no_grad()
def _forget(engine: Engine) -> None:
    for flat in engine.flats:
        for weights in (flat.full, flat.shard):
            if weights.untyped_storage().nbytes():
                weights.fill_(FORGOTTEN)
