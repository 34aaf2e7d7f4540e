"""Loading: every rank reads what overlaps its boxes, whatever sharding was saved."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from shardwise.checkpoint.failure import reason
from shardwise.checkpoint.folder import as_path
from shardwise.checkpoint.save_plans import BoxLoadPlanner, Pages
from shardwise.checkpoint.storage import Check, Pieces
from shardwise.comm.world import World
from shardwise.core.errors import RunError
from shardwise.engine.state.box import Box
from shardwise.techniques.data.buffers import normal_mode

_ALONE = "torch.distributed is (disabled|unavailable)"


@normal_mode()
def load(
    folder: str | os.PathLike[str],
    boxes: Sequence[Box],
    world: World,
    check: Check | None = None,
    convert: bool = False,
    pages: Pages | None = None,
) -> dict[str, Any]:
    """Fill the boxes from the newest checkpoint in `folder`; returns its scalars.

    All ranks must call it.  `folder` may be one checkpoint's own.  The boxes may divide tensors in
    any way, over any number of ranks, and need not cover all saved tensors.  With `convert`,
    values take the dtypes of the boxes, which must be the saved ones otherwise.  First each rank
    checks that the files belong to one save, `check`, the names, shapes and dtypes of its boxes,
    and the hashes of its share of the files.  No rank writes to a box before all checks have passed
    on every rank.  So files are read twice; only one piece at a time is held in memory.
    `pages` gives back those of boxes in mapped files.

    Raises:
        InputError: there is no checkpoint; a tensor is missing or has another shape or dtype; a
            file is missing, damaged or of another checkpoint; whatever `check` raises.
        RunError: a file could not be read after the checks.  Only then are boxes partly written:
            load again, or start with a new engine.
    """
    pieces = Pieces(as_path(folder), world.rank, world.size, check)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_ALONE)
            load_state(
                {},
                storage_reader=pieces,
                planner=BoxLoadPlanner(boxes, str(folder), convert, pages),
                no_dist=world.size == 1,
            )
    except CheckpointException as error:
        failures = {rank: cause for rank, (cause, _) in error.failures.items()}
        why = reason(failures, f"The checkpoint in '{folder}' could not be loaded")
        if pieces.reading:
            raise RunError(
                f"The checkpoint in '{folder}' could not be loaded: it became unreadable after all "
                "checks had passed. The boxes are partly written: load again, or start with a new "
                f"engine. ({why})"
            ) from None
        raise why from None
    return pieces.scalars
