"""Saving: every rank writes its boxes, and the checkpoint appears at once or not at all."""

import json
import os
import shutil
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.failure import LITTLE_BYTES, free_bytes, reason
from shardwise.checkpoint.lock import SAVING_LOCK, only_writer
from shardwise.checkpoint.pages import Pages
from shardwise.checkpoint.plans import BoxSavePlanner
from shardwise.checkpoint.storage import Publisher
from shardwise.comm.world import World
from shardwise.core.arguments import MOST_COUNT, integer
from shardwise.core.errors import bad
from shardwise.engine.box import Box

_ALONE = "torch.distributed is (disabled|unavailable)"


def save(
    folder: str | os.PathLike[str],
    boxes: Sequence[Box],
    scalars: dict[str, Any],
    world: World,
    refusal: str = "",
    pages: Pages | None = None,
    *,
    keep: int | None = None,
    locks: Sequence[Path] = (),
) -> Path:
    """Save a checkpoint in `folder`, which all ranks must see; returns its path.

    All ranks must call it.  The boxes with `replica` 0 of all ranks must cover each element of
    their tensors once; a box that several ranks hold is written by the one with the least to write.
    `scalars` is a JSON object, the same on every rank, with the "step" that names the checkpoint.
    If saving fails, older checkpoints are unchanged.  A non-empty `refusal` says why this rank's
    boxes must not be saved.  `pages` gives back those of boxes in mapped files.  With `keep`, all
    but that many of the newest checkpoints are removed; if that fails, a warning says so.  Rank 0
    holds the lock of the folder, and further `locks`, until all of this is done.

    Raises:
        InputError: the scalars have no step, or cannot be written as JSON; another process is
            writing in the folder.
        RunError: a rank could not write or refuses to; the boxes do not cover their tensors.
    """
    folder = folders.as_path(folder)
    step: Any = scalars.get("step")
    integer("step", step, 0, 100, MOST_COUNT)
    try:
        json.dumps(scalars)
    except (TypeError, ValueError) as error:
        raise bad(
            f"scalars that JSON cannot hold ({error})", "numbers, text, lists and dicts", "int(x)"
        ) from error
    with ExitStack() as held:
        publisher = Publisher(folder, step, scalars, partial(_lock, folder, locks, held))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=_ALONE)
                save_state(
                    {},
                    storage_writer=publisher,
                    planner=BoxSavePlanner(boxes, refusal=refusal, pages=pages),
                    no_dist=world.size == 1,
                )
        except CheckpointException as error:
            what = f"The checkpoint of step {step} could not be saved in '{folder}'"
            raise reason(error, what + _room_in(folder)) from None
        if keep is not None and world.rank == 0:
            _prune(folder, keep)
    return folder / folders.name_of(step)


def _lock(folder: Path, locks: Sequence[Path], held: ExitStack, unfinished: Path) -> None:
    """Hold the locks until the end of `held`, which removes the unfinished files of a failed save.

    They would take space from the next save.  Rank 0 calls it.
    """
    for file in (*locks, folder / SAVING_LOCK):
        held.enter_context(only_writer(folder, file))
    held.callback(shutil.rmtree, unfinished, ignore_errors=True)


def _prune(folder: Path, keep: int) -> None:
    try:
        folders.prune(folder, keep)
    except OSError as error:
        warnings.warn(
            f"old checkpoints in '{folder}' could not be removed ({error}); the new one is saved",
            stacklevel=2,
        )


def _room_in(folder: Path) -> str:
    """The free space, if it is little."""
    free = free_bytes(folder)
    return f", where only {free:.0f} bytes are free" if free < LITTLE_BYTES else ""
