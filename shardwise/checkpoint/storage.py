"""Storage of a checkpoint: written to a hidden folder, then published; checked, then read."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.failure import unwritten
from shardwise.checkpoint.manifest import Manifest, Seal, require_files, seal, write_manifest
from shardwise.checkpoint.open_checkpoint import FORMAT, OpenCheckpoint, open_checkpoint
from shardwise.checkpoint.piece import Piece, check_piece, read_piece
from shardwise.core.errors import InputError, bad
from shardwise.engine.box import block

#: An additional check of a checkpoint before it is loaded; raises InputError.
Check = Callable[[OpenCheckpoint], None]


@dataclass(frozen=True)
class _Written:
    """The position of a written piece, and the seal of its file."""

    place: Any
    seal: Seal


class Publisher(StorageWriter):
    """Writes a checkpoint to a hidden folder, and publishes it once every rank has written.

    torch.distributed.checkpoint calls `finish` on rank 0 when all ranks have written, and raises on
    every rank if it fails: a checkpoint is published for all ranks or for none.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        scalars: dict[str, Any],
        begin: Callable[[Path], None] | None = None,
    ) -> None:
        """Rank 0 calls `begin` with the hidden folder before it is made."""
        self.step = step
        self.scalars = scalars
        self.begin = begin
        self.path = folders.unfinished(folder, step)
        self.files = FileSystemWriter(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: the path is fixed."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.files.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Runs on rank 0, before any rank writes."""
        if self.begin is not None:
            self.begin(self.path)
        folders.clear(self.path)
        return self.files.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces, and hash their files."""
        try:
            results = self.files.write_data(plan, planner).wait()
            names = {result.storage_data.relative_path for result in results}
            seals = {name: seal(self.path / name) for name in names}
        except (OSError, RuntimeError) as error:
            raise unwritten(error, self.path) from None
        done: Future[list[WriteResult]] = Future()
        done.set_result([_sealed(result, seals) for result in results])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Runs on rank 0, after every rank has written.  Writes the manifest last."""
        try:
            self._finish(metadata, results)
        except (OSError, RuntimeError) as error:
            raise unwritten(error, self.path) from None

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [each.storage_data for rank in results for each in rank]
        files = {each.place.relative_path: each.seal for each in written}
        plain = [[replace(r, storage_data=r.storage_data.place) for r in rank] for rank in results]
        self.files.finish(metadata, plain)
        save = uuid4().hex
        said = {"format": FORMAT, "save": save, "ranks": len(results), "scalars": self.scalars}
        text = json.dumps(said, indent=2) + "\n"
        (self.path / folders.SCALARS).write_text(text, encoding="utf-8")
        files |= {name: seal(self.path / name) for name in (folders.METADATA, folders.SCALARS)}
        write_manifest(self.path, Manifest(save, self.step, files))
        folders.publish(self.path, self.step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return FileSystemWriter.validate_checkpoint_id(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return self.files.storage_meta()


class Pieces(StorageReader):
    """Reads a checkpoint: checks all of it, then reads each piece that this rank needs.

    `check` is called with the small files before tensors are checked.  The ranks share the hashing
    of files.  `scalars` is set once the metadata has been read, and `reading` once all checks have
    passed on every rank.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, check: Check | None = None) -> None:
        self.folder, self.path = folder, folder
        self.rank, self.ranks, self.check = rank, ranks, check
        self.scalars: dict[str, Any] = {}
        self.opened: OpenCheckpoint | None = None
        self.reading = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: the path is fixed."""

    def read_metadata(self) -> Metadata:
        """The checkpoint's metadata; if unreadable, with the InputError as `planner_data`.

        The planner raises that error, because errors of a planner reach every rank.
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
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: the metadata are this reader's own."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Hash this rank's share of the files.  An error raised here reaches every rank."""
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


def require_content(opened: OpenCheckpoint, rank: int = 0, ranks: int = 1) -> None:
    """Read this rank's share of all tensors, and raise InputError for damaged ones.

    Compares the hashes of files, then shapes and dtypes.
    """
    require_files(opened.path, opened.manifest, opened.files()[rank::ranks])
    for piece in list(opened.pieces.values())[rank::ranks]:
        check_piece(piece)


def _sealed(result: WriteResult, seals: Mapping[str, Seal]) -> WriteResult:
    """The result with the seal of its file, for the manifest."""
    place = result.storage_data
    return replace(result, storage_data=_Written(place, seals[place.relative_path]))


@torch.no_grad()
def _fill(saved: Tensor, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    for item in items:
        target = planner.resolve_tensor(item)
        target.copy_(block(saved, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)
