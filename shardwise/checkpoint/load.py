"""this file is loading: every rank reads what overlaps its boxes, however they were cut before."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from shardwise.checkpoint.failure import reason
from shardwise.checkpoint.folder import as_path
from shardwise.checkpoint.plans import BoxLoadPlanner
from shardwise.checkpoint.storage import Pieces
from shardwise.comm.world import World
from shardwise.engine.box import Box

_ALONE = "torch.distributed is (disabled|unavailable)"


def load(folder: str | os.PathLike[str], boxes: Sequence[Box], world: World) -> dict[str, Any]:
    """Fill the boxes from the newest checkpoint in `folder`; its scalars.  Called by all ranks.

    `folder` may be one checkpoint's own.  The boxes may be cut in any way, by any number of ranks,
    and need not be all that was saved.  Until every rank's boxes are known to fit, none is touched.

    Raises:
        InputError: there is no checkpoint; it lacks a tensor, or has it with another shape or
            dtype; a file is missing, short or damaged.
    """
    pieces = Pieces(as_path(folder))
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
        raise reason(error, f"The checkpoint in '{folder}' could not be loaded") from None
    return pieces.scalars
