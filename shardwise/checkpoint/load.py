"""Loading: every rank reads the overlaps of its boxes with the saved pieces, after all checks."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.folder import reason
from shardwise.checkpoint.open_checkpoint import (
    OpenCheckpoint,
    Piece,
    open_checkpoint,
    read_piece,
    require_content,
)
from shardwise.checkpoint.save import together
from shardwise.checkpoint.save_plans import Pages
from shardwise.comm.unchanged import normal_mode
from shardwise.comm.world import World
from shardwise.core.errors import Problem, RunError, bad, refusal
from shardwise.engine.state.box import Box, block

#: An additional check of a checkpoint before it is loaded; raises InputError.
Check = Callable[[OpenCheckpoint], None]
#: The number of wrong tensors named in an error.
_NAMED: Final = 6

#: Tensors to fill, by the name and the offsets of their box: several for the step counts of a
#: parameter in tiles.
Targets = dict[MetadataIndex, list[Tensor]]


def planned_reads(
    boxes: Sequence[Box], saved: Mapping[str, Any], checkpoint: str, *, convert: bool
) -> tuple[Targets, list[ReadItem]]:
    """The tensors of the boxes, and their overlaps with the `saved` pieces of each tensor.
    Raises InputError that lists boxes of other names, shapes or (unless `convert`) dtypes.
    """
    problems = (_problem(box, saved.get(box.name), checkpoint, convert) for box in boxes)
    if wrong := [problem for problem in dict.fromkeys(problems) if problem is not None]:
        more = f" and {len(wrong) - _NAMED} more tensors" if len(wrong) > _NAMED else ""
        raise refusal(f"loading '{checkpoint}'{more}", wrong[:_NAMED])
    targets, items = Targets(), list[ReadItem]()
    for box in (box for box in boxes if 0 not in box.sizes):
        index = MetadataIndex(box.name, box.offsets)
        if index not in targets:
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            items += create_read_items_for_chunk_list(box.name, saved[box.name], [chunk])
        targets.setdefault(index, []).append(box.tensor.detach())
    return targets, items


def _problem(box: Box, saved: Any, checkpoint: str, convert: bool) -> Problem | None:
    dtype = str(box.tensor.dtype).removeprefix("torch.")
    if not isinstance(saved, TensorStorageMetadata):
        return Problem(
            f"'{box.name}' of {tuple(box.shape)} {dtype}, which the checkpoint does not have",
            "tensors in the checkpoint",
            f"shardwise checkpoint inspect {shlex.quote(checkpoint)} --all, to see their names",
        )
    if tuple(saved.size) != tuple(box.shape):
        return Problem(
            f"'{box.name}' of shape {tuple(box.shape)}",
            f"the shape it was saved with, {tuple(saved.size)}",
            "the model's configuration at the time of saving",
        )
    if saved.properties.dtype != box.tensor.dtype and not convert:
        return Problem(
            f"'{box.name}' in {dtype}",
            f"the dtype it was saved with, {str(saved.properties.dtype).removeprefix('torch.')}",
            "a plan whose master weights have that dtype",
        )
    return None


@torch.no_grad()
def _fill(
    opened: OpenCheckpoint, targets: Targets, items: Sequence[ReadItem], pages: Pages
) -> None:
    """Read each piece once. Raises InputError for a file that is missing, short or damaged."""
    wanted: dict[Piece, list[ReadItem]] = {}
    for item in items:
        wanted.setdefault(opened.pieces[item.storage_index], []).append(item)
    for piece in sorted(wanted, key=lambda piece: (piece.file, piece.offset)):
        saved = read_piece(piece)
        for item in wanted[piece]:
            for target in targets[item.dest_index]:
                part = block(target, item.dest_offsets, item.lengths)
                part.copy_(block(saved, item.storage_offsets, item.lengths))
                pages.seen(part)


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
    All ranks must call it. `folder` may be one checkpoint's own. The boxes may divide tensors in
    any way, over any number of ranks, and need not cover all saved tensors. With `convert`, values
    take the dtypes of the boxes. First each rank checks that the files belong to one save, `check`,
    the names, shapes and dtypes of its boxes, and the hashes of its share of the files. No rank
    writes to a box before all checks have passed on every rank. So files are read twice; only one
    piece at a time is held in memory. `pages` releases the pages of mapped files.
    Raises InputError, with the boxes unchanged; RunError for a file that cannot be read after the
    checks, when some boxes are written: load again, or start with a new engine.
    """
    place = folders.as_path(folder)
    failed = partial(reason, what=f"The checkpoint in '{place}' could not be loaded")
    found: list[tuple[OpenCheckpoint, Targets, list[ReadItem]]] = []

    def checked() -> str:
        """Check all that this rank reads, and its share of the files; the id of the save."""
        opened = open_checkpoint(folders.find(place))
        if check is not None:
            check(opened)
        saved = opened.metadata.state_dict_metadata
        reads = planned_reads(boxes, saved, str(folder), convert=convert)
        require_content(opened, world.rank, world.size)
        found.append((opened, *reads))
        return opened.manifest.save

    def unreadable(failures: Mapping[int, BaseException]) -> BaseException:
        return RunError(
            f"The checkpoint in '{place}' could not be loaded: it became unreadable after all "
            "checks had passed. The boxes are partly written: load again, or start with a new "
            f"engine. ({failed(failures)})"
        )

    marks = together(checked, world, failed)
    opened, targets, items = found[0]
    if other := [rank for rank, mark in enumerate(marks) if mark != marks[0]]:
        raise bad(
            f"the checkpoint folder '{place}', where rank {other[0]} finds another than rank 0",
            "one folder shared by all ranks",
            "a folder on a network disk that all machines mount",
        )
    together(lambda: _fill(opened, targets, items, pages or Pages()), world, unreadable)
    return opened.scalars
