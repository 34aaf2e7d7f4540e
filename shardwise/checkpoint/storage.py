"""Storage of a checkpoint: written to a hidden folder, then published; checked, then read."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar
from uuid import uuid4

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.folder import reason, unwritten
from shardwise.checkpoint.metadata import Piece, read_piece
from shardwise.checkpoint.open_checkpoint import (
    FORMAT,
    Manifest,
    OpenCheckpoint,
    Seal,
    open_checkpoint,
    require_content,
    seal,
    write_manifest,
)
from shardwise.checkpoint.save_plans import Pages, Targets, planned_reads
from shardwise.comm.move import all_gather_object
from shardwise.comm.world import World
from shardwise.core.errors import RunError, bad
from shardwise.engine.state.box import Box, block
from shardwise.techniques.data.buffers import normal_mode

#: An additional check of a checkpoint before it is loaded; raises InputError.
Check = Callable[[OpenCheckpoint], None]

T = TypeVar("T")


@dataclass(frozen=True)
class Written:
    """One rank's files, and (tensor, offsets, file, first byte, bytes) of each piece."""

    pieces: list[tuple[str, list[int], str, int, int]]
    files: dict[str, Seal]

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(values["pieces"], {n: Seal(**seal) for n, seal in values["files"].items()})


class Publisher:
    """Writes a checkpoint to a hidden folder, and publishes it once every rank has written."""

    def __init__(self, folder: Path, step: int, scalars: dict[str, Any]) -> None:
        self.step = step
        self.scalars = scalars
        self.path = folders.unfinished(folder, step)
        self.files = FileSystemWriter(self.path)

    def write(self, plan: SavePlan, planner: SavePlanner) -> Written:
        """Write this rank's pieces, and hash their files."""
        try:
            results = self.files.write_data(plan, planner).wait()
            names = {result.storage_data.relative_path for result in results}
            seals = {name: seal(self.path / name) for name in names}
        except RunError:
            raise
        except (OSError, RuntimeError) as error:
            raise unwritten(error, self.path) from None
        places = [(result.index, result.storage_data) for result in results]
        pieces = [
            (index.fqn, [*(index.offset or ())], at.relative_path, at.offset, at.length)
            for index, at in places
        ]
        return Written(pieces, seals)

    def publish(self, metadata: Metadata, every: Sequence[Written]) -> None:
        """Write the index and the manifest, and publish. Rank 0 calls it, when all have written."""
        try:
            self._publish(metadata, every)
        except (OSError, RuntimeError) as error:
            raise unwritten(error, self.path) from None

    def _publish(self, metadata: Metadata, every: Sequence[Written]) -> None:
        files = {name: each for written in every for name, each in written.files.items()}
        self.files.finish(metadata, [[_result(*piece) for piece in w.pieces] for w in every])
        save = uuid4().hex
        said = {"format": FORMAT, "save": save, "ranks": len(every), "scalars": self.scalars}
        text = json.dumps(said, indent=2) + "\n"
        (self.path / folders.SCALARS).write_text(text, encoding="utf-8")
        files |= {name: seal(self.path / name) for name in (folders.METADATA, folders.SCALARS)}
        write_manifest(self.path, Manifest(save, self.step, files))
        folders.publish(self.path, self.step)


def _result(name: str, offsets: Sequence[int], file: str, first: int, size: int) -> WriteResult:
    place = _StorageInfo(file, first, size)
    return WriteResult(MetadataIndex(name, torch.Size(offsets)), size, place)


def together(
    act: Callable[[], T],
    world: World,
    failed: Callable[[Mapping[int, BaseException]], BaseException],
) -> list[T]:
    """The results of all ranks. Called by all of them; raises on each what `failed` returns for the
    failures by rank.
    """
    own: tuple[T | None, BaseException | None]
    try:
        own = act(), None
    except BaseException as error:  # noqa: BLE001  the others wait for this rank
        own = None, error
    every: list[Any] = all_gather_object(own, world)
    if failures := {rank: error for rank, (_, error) in enumerate(every) if error is not None}:
        raise failed(failures) from None
    return [result for result, _ in every]


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
        return opened.mark

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
            f"the checkpoint folder '{place}', in which rank {other[0]} finds another checkpoint "
            "than rank 0",
            "one folder shared by all ranks",
            "a folder on a network disk that all machines mount",
        )
    together(lambda: _fill(opened, targets, items, pages or Pages()), world, unreadable)
    return opened.scalars
