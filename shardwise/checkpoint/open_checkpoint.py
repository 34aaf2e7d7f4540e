"""Opening a checkpoint: its small files, checked to belong together, and its contents.

    manifest.json -> scalars.json, .metadata      checked by hash, then parsed
                  -> files of tensors             checked by length; by hash if asked

The manifest has the length and SHA-256 of each file, a random id of the save, which is also in
scalars.json, and its own hash. It is written last. When saving, each rank hashes the files it has
written. When loading, the ranks share the hashing before anything is written into an engine.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.folder import MANIFEST, METADATA, SCALARS, damaged, find, unread
from shardwise.checkpoint.metadata import Piece, pieces_of, read_metadata
from shardwise.core.errors import bad, open_regular, read_text
from shardwise.core.tools.arguments import is_count, short_repr

MANIFEST_FORMAT: Final = "shardwise manifest 1"
#: Bytes of the largest manifest, some 400,000 files.
MOST_BYTES: Final = 2**26


@dataclass(frozen=True)
class Seal:
    """The length and the SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of one save, by name."""

    save: str
    step: int
    files: Mapping[str, Seal]

    def text(self) -> str:
        body: dict[str, Any] = {"format": MANIFEST_FORMAT, "save": self.save, "step": self.step}
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
    try:
        text = read_text(file, MOST_BYTES)
    except OSError as error:
        raise unread(file, error) from None
    except ValueError as error:
        raise damaged(file, str(error)) from None
    try:
        body = json.loads(text)
        files = {name: Seal(**each) for name, each in body["files"].items()}
        manifest = Manifest(body["save"], body["step"], files)
        same = manifest.text() == text and all(name == Path(name).name for name in files)
        same &= type(manifest.step) is int and type(manifest.save) is str
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        same = False
    if not same:
        raise damaged(file, "its own hash does not match")
    if folders.is_named_by_step(path) and folders.step_of(path) != manifest.step:
        raise damaged(file, f"it is of step {manifest.step}")
    return manifest


def require_sizes(path: Path, manifest: Manifest) -> None:
    """Raise InputError unless every file exists with its length. Reads no file."""
    for name, sealed in manifest.files.items():
        file = path / name
        try:
            found = file.stat()
        except OSError as error:
            raise unread(file, error) from None
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
        if _sealed(file) != manifest.files[name]:
            raise damaged(file, "its SHA-256 is not the one in the manifest")


def _sealed(file: Path) -> Seal:
    try:
        return seal(file)
    except OSError as error:
        raise unread(file, error) from None


#: The first entry of scalars.json.
FORMAT = "shardwise 2"
#: The scalar that only imported weights have: the folder that they are from.
IMPORTED = "weights_of"
#: Prefixes of tensor names (engine/state/state.py).
MODEL, OPTIMIZER = "model/", "optim/"


@dataclass(frozen=True)
class OpenCheckpoint:
    """The small files of a checkpoint."""

    path: Path
    ranks: int
    scalars: dict[str, Any]
    metadata: Metadata
    manifest: Manifest

    @property
    def mark(self) -> str:
        return self.manifest.save

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
    require_files(path, manifest, (METADATA, SCALARS))
    said = _scalars(path)
    if (said.get("save"), said["scalars"]["step"]) != (manifest.save, manifest.step):
        raise damaged(path / SCALARS, "it is of another save or step than the manifest")
    opened = OpenCheckpoint(path, said["ranks"], said["scalars"], read_metadata(path), manifest)
    if unknown := set(opened.files()) - set(manifest.files):
        raise damaged(path / MANIFEST, f"it does not name {min(unknown)}")
    return opened


def _scalars(path: Path) -> dict[str, Any]:
    file = path / SCALARS
    try:
        with open_regular(file) as stream:
            said = json.loads(stream.read().decode())
    except OSError as error:
        raise unread(file, error) from None
    except (ValueError, RecursionError) as error:
        raise damaged(file, repr(error)) from error
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        saved = said.get("format") if isinstance(said, dict) else None
        raise bad(
            f"'{file}' in the format {short_repr(saved)}",
            f"checkpoints in the format '{FORMAT}', which this version of shardwise reads",
            "the version of shardwise that saved it, whose 'shardwise checkpoint export' writes "
            "its weights as safetensors for any version",
        )
    ranks, scalars = said.get("ranks"), said.get("scalars")
    if type(ranks) is not int or ranks < 1 or not isinstance(scalars, dict):
        raise damaged(file, "its ranks or scalars are missing")
    if not is_count(scalars.get("step")):
        raise damaged(file, f"its step is {short_repr(scalars.get('step'))}")
    return said


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
    found = {"path": str(opened.path), "ranks": opened.ranks, "scalars": opened.scalars}
    return found | {"tensors": tensors, "parameters": sum(map(math.prod, model))} | sums
