"""Opening a checkpoint: its small files, checked to belong together, and its contents.

    manifest.json -> numbers of the engine and the program
                  -> .metadata                    checked by hash, then parsed
                  -> files of tensors             checked by length; by hash if asked
    .metadata     -> each tensor's shape, dtype and pieces, and each piece's file, offset, length

The manifest has the length and SHA-256 of each file, a random id of the save, and its own hash. It
is written last. When saving, each rank hashes the files it has written. When loading, the ranks
share the hashing before anything is written into an engine.

torch.distributed.checkpoint writes the index as a pickle, and `pickle.load` would call any function
that a pickle names. This reader constructs nothing but the index's own classes, and torch.load
reads pieces with weights_only. So a checkpoint from elsewhere runs no code.
"""

import hashlib
import io
import json
import math
import os
import pickle
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.folder import MANIFEST, METADATA, damaged, find, reading
from shardwise.checkpoint.save_plans import check_whole
from shardwise.core.errors import bad, open_regular, read_text
from shardwise.core.tools.arguments import is_count, short_repr

#: The first entry of a manifest.
FORMAT: Final = "shardwise 3"
#: Bytes of the largest manifest, some 400,000 files.
MOST_BYTES: Final = 2**26


@dataclass(frozen=True)
class Seal:
    """The length and the SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """One save: its random id, the ranks that made it, its numbers, and its files by name."""

    save: str
    ranks: int
    scalars: dict[str, Any]
    files: Mapping[str, Seal]

    def text(self) -> str:
        body: dict[str, Any] = {"format": FORMAT, "save": self.save, "ranks": self.ranks}
        body["scalars"] = self.scalars
        body["files"] = {name: asdict(seal) for name, seal in sorted(self.files.items())}
        body["sha256"] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        return json.dumps(body, indent=2) + "\n"


def seal(file: Path) -> Seal:
    with open_regular(file) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return Seal(stream.tell(), digest)


def write_manifest(path: Path, manifest: Manifest) -> None:
    (path / folders.MANIFEST).write_text(manifest.text(), encoding="utf-8")


def read_manifest(path: Path) -> Manifest:
    """Raises InputError if it is missing, damaged or belongs to a checkpoint of another step."""
    file = path / folders.MANIFEST
    with reading(file):
        text = read_text(file, MOST_BYTES)
        body = json.loads(text)
        files = {name: Seal(**each) for name, each in body["files"].items()}
        if body["format"] != FORMAT:
            raise bad(
                f"'{file}' in the format {short_repr(body['format'])}",
                f"checkpoints in the format '{FORMAT}', which this version of shardwise reads",
                "shardwise checkpoint export with the version that saved it, for the weights",
            )
        manifest = Manifest(body["save"], body["ranks"], body["scalars"], files)
        if manifest.text() != text or any(name != Path(name).name for name in files):
            raise damaged(file, "its own hash does not match")
        ranks, step = manifest.ranks, manifest.scalars.get("step")
        if type(ranks) is not int or ranks < 1 or type(manifest.save) is not str:
            raise damaged(file, "its ranks or its id are missing")
    if not is_count(step) or (folders.is_named_by_step(path) and folders.step_of(path) != step):
        raise damaged(file, f"its step is {short_repr(step)}")
    return manifest


def require_sizes(path: Path, manifest: Manifest) -> None:
    """Raise InputError unless every file exists with its length. Reads no file."""
    for name, sealed in manifest.files.items():
        file = path / name
        with reading(file):
            found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise damaged(file, "it is no regular file")
        if found.st_size != sealed.bytes:
            raise damaged(file, f"it has {found.st_size} bytes and should have {sealed.bytes}")


def require_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read these files, and raise InputError unless each has its hash."""
    for name in names:
        file = path / name
        if name not in manifest.files:
            raise damaged(path / folders.MANIFEST, f"it does not name {name}")
        with reading(file):
            found = seal(file)
        if found != manifest.files[name]:
            raise damaged(file, "its SHA-256 is not the one in the manifest")


# --- the index of the tensors ---------------------------------------------------------------------

#: What an index may name, by module; also dtypes.
_ALLOWED: Final = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "WindowsPath"},  # the path at the time of saving, unused
    "pathlib._local": {"PosixPath", "WindowsPath"},
}


@dataclass(frozen=True)
class Piece:
    """`length` bytes of a file, with a tensor of these sizes and dtype."""

    file: Path
    offset: int
    length: int
    sizes: torch.Size
    dtype: torch.dtype


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        dtype = getattr(torch, global_name, None) if module_name == "torch" else None
        if global_name in _ALLOWED.get(module_name, ()) or isinstance(dtype, torch.dtype):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which is refused")


def read_metadata(path: Path) -> Metadata:
    """The names, shapes and file positions of a checkpoint's tensors."""
    with reading(path / METADATA) as file, open_regular(file) as stream:
        metadata: Metadata = _Reader(stream).load()
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            check_whole(name, tensor)
        pieces_of(path, metadata)
    return metadata


def pieces_of(path: Path, metadata: Metadata) -> dict[MetadataIndex, Piece]:
    """All pieces of the checkpoint in the folder `path`."""
    found: dict[MetadataIndex, Piece] = {}
    places = metadata.storage_data or {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)  # of which an index consists
        for chunk in tensor.chunks:
            index = MetadataIndex(name, chunk.offsets)
            place, dtype = places[index], tensor.properties.dtype
            file = path / place.relative_path
            if file.parent != path:
                raise ValueError(f"a file outside the checkpoint's folder, '{file}'")
            found[index] = Piece(file, place.offset, place.length, chunk.sizes, dtype)
    return found


def read_piece(piece: Piece) -> Tensor:
    """Raises InputError for a damaged piece."""
    with reading(piece.file), open_regular(piece.file) as stream:
        if os.fstat(stream.fileno()).st_size < piece.offset + piece.length:
            raise ValueError(f"it has less than {piece.offset + piece.length} bytes")
        stream.seek(piece.offset)
        content = io.BytesIO(stream.read(piece.length))
        found = torch.load(content, map_location="cpu", weights_only=True)
        if (found.shape, found.dtype) != (piece.sizes, piece.dtype):
            raise ValueError("a tensor in it has another shape or dtype than in the index")
    return found


# --- a checkpoint as a whole ----------------------------------------------------------------------

#: The scalar that only imported weights have: the folder that they are from.
IMPORTED = "weights_of"
#: Prefixes of tensor names (engine/state/state.py).
MODEL, OPTIMIZER = "model/", "optim/"


@dataclass(frozen=True)
class OpenCheckpoint:
    """The small files of a checkpoint."""

    path: Path
    metadata: Metadata
    manifest: Manifest

    @property
    def scalars(self) -> dict[str, Any]:
        return self.manifest.scalars

    @property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The full shape and the dtype of each tensor, by name."""
        saved = self.metadata.state_dict_metadata.items()
        return {
            name: (tuple(tensor.size), tensor.properties.dtype)
            for name, tensor in saved
            if isinstance(tensor, TensorStorageMetadata)
        }

    @cached_property
    def pieces(self) -> dict[MetadataIndex, Piece]:
        return pieces_of(self.path, self.metadata)

    def files(self) -> list[str]:
        return sorted({piece.file.name for piece in self.pieces.values()})


def open_checkpoint(path: Path) -> OpenCheckpoint:
    """Read a checkpoint except its tensors, whose files must exist with the right length."""
    manifest = read_manifest(path)
    require_sizes(path, manifest)
    require_files(path, manifest, (METADATA,))
    opened = OpenCheckpoint(path, read_metadata(path), manifest)
    if unknown := set(opened.files()) - set(manifest.files):
        raise damaged(path / MANIFEST, f"it does not name {min(unknown)}")
    return opened


def require_content(opened: OpenCheckpoint, rank: int = 0, ranks: int = 1) -> None:
    """Compare this rank's share of the files with their hashes; raises InputError."""
    require_files(opened.path, opened.manifest, opened.files()[rank::ranks])


def describe(folder: str | os.PathLike[str], deep: bool = False) -> dict[str, Any]:
    """The contents of the checkpoint that `find` returns, as `checkpoint inspect --json` prints
    them; `deep` compares all bytes with hashes. Bytes are those of tensors, without file headers.
    """
    opened = open_checkpoint(find(folder))
    if deep:
        require_content(opened)
    tensors: list[dict[str, Any]] = [
        {
            "name": name,
            "shape": [*tensor.size],
            "dtype": str(tensor.properties.dtype).removeprefix("torch."),
            "bytes": math.prod(tensor.size) * tensor.properties.dtype.itemsize,
            "pieces": len(tensor.chunks),
        }
        for name, tensor in sorted(opened.metadata.state_dict_metadata.items())
        if isinstance(tensor, TensorStorageMetadata)
    ]
    kinds = {"bytes": "", "model_bytes": MODEL, "optimizer_bytes": OPTIMIZER}
    sums = {n: sum(t["bytes"] for t in tensors if t["name"].startswith(kinds[n])) for n in kinds}
    model = (tensor["shape"] for tensor in tensors if tensor["name"].startswith(MODEL))
    found = {"path": str(opened.path), "ranks": opened.manifest.ranks, "scalars": opened.scalars}
    return found | {"tensors": tensors, "parameters": sum(map(math.prod, model))} | sums
