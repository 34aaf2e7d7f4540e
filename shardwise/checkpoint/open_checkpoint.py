"""Opening a checkpoint: reads its small files and checks that they belong together.

manifest.json -> scalars.json, .metadata      checked by hash, then parsed
              -> files of tensors             checked by length; by hash if asked
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shardwise.checkpoint.failure import damaged, foreign, unread
from shardwise.checkpoint.folder import MANIFEST, METADATA, SCALARS
from shardwise.checkpoint.manifest import Manifest, read_manifest, require_files, require_sizes
from shardwise.checkpoint.metadata import read_metadata
from shardwise.checkpoint.piece import Piece, pieces_of
from shardwise.core.errors import bad, open_regular
from shardwise.core.tools.arguments import is_count, short_repr

#: The first entry of scalars.json.
FORMAT = "shardwise 2"
#: The scalar that only imported weights have: the folder that they are from.
IMPORTED = "weights_of"


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
        """The id of the save."""
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
        """Where each piece of a tensor is."""
        return pieces_of(self.path, self.metadata)

    def files(self) -> list[str]:
        """The names of the files of tensors."""
        return sorted({piece.file.name for piece in self.pieces.values()})


def open_checkpoint(path: Path) -> OpenCheckpoint:
    """Read a checkpoint except its tensors, whose files must exist with the right length.

    Raises InputError for a file that is missing, damaged or of another checkpoint, or unreadable.
    """
    manifest = read_manifest(path)
    require_sizes(path, manifest)
    require_files(path, manifest, (METADATA, SCALARS))
    said = _scalars(path)
    if said.get("save") != manifest.save:
        raise foreign(path / SCALARS, "it is of another save than the manifest")
    if said["scalars"]["step"] != manifest.step:
        raise foreign(path / SCALARS, "it is of another step than the manifest")
    opened = OpenCheckpoint(path, said["ranks"], said["scalars"], read_metadata(path), manifest)
    if unknown := set(opened.files()) - set(manifest.files):
        raise damaged(path / MANIFEST, f"it does not name {min(unknown)}")
    _require_sizes(opened)
    return opened


def _scalars(path: Path) -> dict[str, Any]:
    """The contents of scalars.json: format, number of ranks, scalars.  Raises InputError."""
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


def _require_sizes(opened: OpenCheckpoint) -> None:
    """Raise InputError unless every file in the metadata exists and is long enough."""
    wanted: dict[str, int] = {}
    for piece in opened.pieces.values():
        wanted[piece.file.name] = max(piece.offset + piece.length, wanted.get(piece.file.name, 0))
    for name, size in sorted(wanted.items()):
        file = opened.path / name
        if not file.is_file():
            raise damaged(file, "it is not there")
        if file.stat().st_size < size:
            has = file.stat().st_size
            raise damaged(file, f"it has {has} bytes and should have {size} or more")
