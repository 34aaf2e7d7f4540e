"""Loading: every rank reads what overlaps its boxes, however they were cut before."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from shardwise.checkpoint.failure import reason
from shardwise.checkpoint.folder import as_path
from shardwise.checkpoint.plans import BoxLoadPlanner
from shardwise.checkpoint.storage import Check, Pieces
from shardwise.comm.world import World
from shardwise.core.errors import RunError
from shardwise.engine.box import Box

_ALONE = "torch.distributed is (disabled|unavailable)"


def load(
    folder: str | os.PathLike[str],
    boxes: Sequence[Box],
    world: World,
    check: Check | None = None,
) -> dict[str, Any]:
    """Fill the boxes from the newest checkpoint in `folder`; its scalars.  Called by all ranks.

    `folder` may be one checkpoint's own.  The boxes may be cut in any way, by any number of ranks,
    and need not be all that was saved.  Each rank checks first: that the files belong to one save,
    `check` of what else the checkpoint says, names, shapes and dtypes of its boxes, the hashes of
    its share of all files.  No box of any rank is written to before every rank has found all that
    in order.  So files are read twice; nothing is held in memory but one piece.

    Raises:
        InputError: there is no checkpoint; it lacks a tensor, or has it with another shape or
            dtype; a file is missing, damaged or another checkpoint's; what `check` raises.
        RunError: a file could not be read a second time, after all had been found in order.  Only
            then are boxes partly written: load again, or begin with a new engine.
    """
    pieces = Pieces(as_path(folder), world.rank, world.size, check)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_ALONE)
            load_state(
                {},
                storage_reader=pieces,
                planner=BoxLoadPlanner(boxes, str(folder)),
                no_dist=world.size == 1,
            )
    except CheckpointException as error:
        what = f"The checkpoint in '{folder}' could not be loaded"
        if pieces.reading:
            raise RunError(
                f"{what}: it became unreadable while it was read, after all of it had been found "
                "in order. The boxes are partly written: load again, or begin with a new engine. "
                f"({reason(error, what)})"
            ) from None
        raise reason(error, what) from None
    return pieces.scalars
