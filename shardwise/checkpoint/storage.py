"""this file is the files of a checkpoint: written unseen, then published; read by pieces."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

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
from shardwise.checkpoint.plans import part
from shardwise.core.errors import InputError, bad

#: The first entry of scalars.json, for whoever reads it in years to come.
FORMAT = "shardwise 1"


class Publisher(StorageWriter):
    """Writes a checkpoint beside its place, and publishes it once every rank has written.

    torch.distributed.checkpoint calls `finish` on the first rank when all have written their
    files, and tells every rank if it fails: so a checkpoint is published for all or for none.
    """

    def __init__(self, folder: Path, step: int, scalars: dict[str, Any]) -> None:
        self.step = step
        self.scalars = scalars
        self.path = folders.unfinished(folder, step)
        self.files = FileSystemWriter(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The path was given at the beginning, and stays."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.files.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank, before any rank writes."""
        folders.clear(self.path)
        return self.files.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return self.files.write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when every rank has written."""
        self.files.finish(metadata, results)
        written = {"format": FORMAT, "ranks": len(results), "scalars": self.scalars}
        text = json.dumps(written, indent=2) + "\n"
        (self.path / folders.SCALARS).write_text(text, encoding="utf-8")
        folders.publish(self.path, self.step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return FileSystemWriter.validate_checkpoint_id(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return self.files.storage_meta()


class Pieces(StorageReader):
    """Reads a checkpoint: each piece that a rank needs is read once, and is not kept.

    `scalars` is there once the metadata has been read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder
        self.scalars: dict[str, Any] = {}
        self.places: dict[Any, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The path was given at the beginning, and stays."""

    def read_metadata(self) -> Metadata:
        """What the checkpoint has; an InputError instead of a planner's data if that is unreadable.

        It is the planner that raises it: what is raised there reaches every rank.
        """
        try:
            self.path = folders.find(self.folder)
            self.scalars = read_scalars(self.path)["scalars"]
            return read_metadata(self.path)
        except InputError as error:
            return Metadata({}, planner_data=error, storage_data={})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self.places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the boxes. Raises InputError for a file that is missing, short or damaged."""
        wanted: dict[tuple[str, int], list[ReadItem]] = {}
        for item in plan.items:
            place = self.places[item.storage_index]
            wanted.setdefault((place.relative_path, place.offset), []).append(item)
        for (name, offset), items in sorted(wanted.items(), key=lambda entry: entry[0]):
            length = self.places[items[0].storage_index].length
            piece = _read(self.path / name, offset, length)
            _fill(self.path / name, piece, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return FileSystemReader.validate_checkpoint_id(checkpoint_id)


def read_metadata(path: Path) -> Metadata:
    """The names, shapes and places of a checkpoint's tensors. Raises InputError if damaged."""
    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:  # what a pickle of nonsense raises depends on the nonsense
        raise _damaged(path / folders.METADATA, repr(error)) from error
    if not isinstance(metadata, Metadata) or metadata.storage_data is None:
        raise _damaged(path / folders.METADATA, "it describes no tensors")
    return metadata


def require_files(path: Path, metadata: Metadata) -> None:
    """Raise InputError unless every file that the metadata names is there and long enough.

    Nothing is read: the files' sizes tell.
    """
    wanted: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        end = place.offset + place.length
        wanted[place.relative_path] = max(end, wanted.get(place.relative_path, 0))
    for name, size in sorted(wanted.items()):
        file = path / name
        if not file.is_file():
            raise _damaged(file, "it is not there")
        if file.stat().st_size < size:
            raise _damaged(file, _short(file, size))


def read_scalars(path: Path) -> dict[str, Any]:
    """What scalars.json says: its format, the number of ranks, the scalars; or an InputError."""
    file = path / folders.SCALARS
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(file, repr(error)) from error
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise bad(
            f"'{file}' of another format than '{FORMAT}'",
            "checkpoints of this version",
            "a checkpoint that 'shardwise train' saved",
        )
    if not isinstance(said.get("ranks"), int) or not isinstance(said.get("scalars"), dict):
        raise _damaged(file, "its ranks or scalars are missing")
    return said


def _read(file: Path, offset: int, length: int) -> Tensor:
    try:
        with file.open("rb") as stream:
            content = _exactly(file, stream, offset, length)
        _check(file, content)
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except InputError:
        raise
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise _damaged(file, str(error).splitlines()[0]) from error


def _check(file: Path, content: bytes) -> None:
    """Raise InputError unless the piece is what was written, by the checksums it came with."""
    if not torch.serialization.get_crc32_options():  # the program has them left out
        return
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as records:
            wrong = records.testzip()
    except zipfile.BadZipFile as error:
        raise _damaged(file, str(error)) from error
    if wrong is not None:
        raise _damaged(file, f"the checksum of {wrong} is another than when it was written")


def _exactly(file: Path, stream: IO[bytes], offset: int, length: int) -> bytes:
    stream.seek(offset)
    content = stream.read(length)
    if len(content) < length:
        raise _damaged(file, _short(file, offset + length))
    return content


def _short(file: Path, size: int) -> str:
    return f"it has {file.stat().st_size} bytes and should have {size} or more"


@torch.no_grad()
def _fill(file: Path, piece: Tensor, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    for item in items:
        target = planner.resolve_tensor(item)
        ends = map(sum, zip(item.storage_offsets, item.lengths, strict=True))
        fits = piece.dim() == len(item.lengths) and all(map(int.__ge__, piece.shape, ends))
        if not fits or piece.dtype != target.dtype:
            raise _damaged(file, f"'{item.storage_index.fqn}' has changed its shape or dtype")
        target.copy_(part(piece, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)


def _damaged(file: Path, why: str) -> InputError:
    path = file.parent
    others = [other.name for other in folders.all_in(path.parent) if other != path]
    if others:
        instead = (
            f"rm -r '{path}', and the same command again: {others[-1]} is the newest then, and "
            "what was trained after it is trained again"
        )
    else:
        instead = (
            f"a copy of '{path}' from elsewhere, for no other checkpoint is beside it; or a new "
            "run (shardwise train with --overwrite)"
        )
    return bad(
        f"the file '{file}', which is damaged ({why})", "a checkpoint as it was saved", instead
    )
