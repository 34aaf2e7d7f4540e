"""Storage of a checkpoint: written to a hidden folder, then published; checked, then read."""

import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

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
from shardwise.checkpoint.save_plans import BoxLoadPlanner, Pages
from shardwise.comm.world import World
from shardwise.core.errors import InputError, RunError, bad
from shardwise.engine.state.box import Box, block
from shardwise.techniques.data.buffers import normal_mode

#: An additional check of a checkpoint before it is loaded; raises InputError.
Check = Callable[[OpenCheckpoint], None]
_ALONE = "torch.distributed is (disabled|unavailable)"


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


class Pieces(StorageReader):
    """Reads a checkpoint: checks all of it, then reads each piece that this rank needs.
    `check` is called with the small files before tensors are checked. `scalars` is set once the
    metadata has been read, and `reading` once all checks have passed on every rank.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, check: Check | None = None) -> None:
        self.folder, self.path = folder, folder
        self.rank, self.ranks, self.check = rank, ranks, check
        self.scalars: dict[str, Any] = {}
        self.opened: OpenCheckpoint | None = None
        self.reading = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self) -> Metadata:
        """The checkpoint's metadata; if unreadable, with the InputError as `planner_data`. The
        planner raises that error, because errors of a planner reach every rank.
        """
        try:
            self.path = folders.find(self.folder)
            self.opened = open_checkpoint(self.path)
            self.scalars = self.opened.scalars
            if self.check is not None:
                self.check(self.opened)
        except InputError as error:
            return Metadata({}, planner_data=error, storage_data={})
        return self.opened.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        """Nothing to do: the metadata are this reader's own."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Hash this rank's share of the files. An error raised here reaches every rank."""
        assert self.opened is not None
        require_content(self.opened, self.rank, self.ranks)
        return replace(plan, planner_data=self.opened.mark)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise InputError unless all ranks have found the same checkpoint."""
        other = [rank for rank, p in enumerate(plans) if p.planner_data != plans[0].planner_data]
        if other:
            raise bad(
                f"the checkpoint folder '{self.folder}', in which rank {other[0]} finds another "
                f"checkpoint than rank 0, which finds {self.path.name}",
                "one folder shared by all ranks",
                "a folder on a network disk that all machines mount",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the boxes. Raises InputError for a file that is missing, short or damaged."""
        self.reading = True
        assert self.opened is not None
        wanted: dict[Piece, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(self.opened.pieces[item.storage_index], []).append(item)
        for piece in sorted(wanted, key=lambda piece: (piece.file, piece.offset)):
            _fill(read_piece(piece), wanted[piece], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return FileSystemReader.validate_checkpoint_id(checkpoint_id)


@torch.no_grad()
def _fill(saved: Tensor, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    for item in items:
        target = planner.resolve_tensor(item)
        target.copy_(block(saved, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)


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
    pieces = Pieces(folders.as_path(folder), world.rank, world.size, check)
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
