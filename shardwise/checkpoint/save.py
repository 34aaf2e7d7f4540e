"""Saving: every rank writes its boxes, and the checkpoint appears at once or not at all."""

import json
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.failure import LITTLE_BYTES, free_bytes, reason
from shardwise.checkpoint.pages import Pages
from shardwise.checkpoint.plans import BoxSavePlanner
from shardwise.checkpoint.storage import Publisher
from shardwise.comm.world import World
from shardwise.core.arguments import integer
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
) -> Path:
    """Save a checkpoint in `folder`, which all ranks must see; returns its path.

    All ranks must call it.  The boxes with `replica` 0 of all ranks must cover each element of
    their tensors once; a box that several ranks hold is written by the one with the least to write.
    `scalars` is a JSON object, the same on every rank, with the "step" that names the checkpoint.
    If saving fails, older checkpoints are unchanged.  A non-empty `refusal` says why this rank's
    boxes must not be saved.  `pages` gives back those of boxes in mapped files.

    Raises:
        InputError: the scalars have no step, or cannot be written as JSON.
        RunError: a rank could not write or refuses to; the boxes do not cover their tensors.
    """
    folder = folders.as_path(folder)
    step: Any = scalars.get("step")
    integer("step", step, 0, 100)
    try:
        json.dumps(scalars)
    except (TypeError, ValueError) as error:
        raise bad(
            f"scalars that JSON cannot hold ({error})", "numbers, text, lists and dicts", "int(x)"
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_ALONE)
            save_state(
                {},
                storage_writer=Publisher(folder, step, scalars),
                planner=BoxSavePlanner(boxes, refusal=refusal, pages=pages),
                no_dist=world.size == 1,
                process_group=world.group,
            )
    except CheckpointException as error:
        what = f"The checkpoint of step {step} could not be saved in '{folder}'{_room_in(folder)}"
        if world.rank == 0:  # partial files would take space from the next save
            shutil.rmtree(folders.unfinished(folder, step), ignore_errors=True)
        raise reason(error, what) from None
    return folder / folders.name_of(step)


def _room_in(folder: Path) -> str:
    """The free space, if it is little."""
    free = free_bytes(folder)
    return f", where only {free:.0f} bytes are free" if free < LITTLE_BYTES else ""
