"""What a checkpoint holds, from its small files; with `deep`, every byte of it is verified."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardwise.checkpoint.folder import find
from shardwise.checkpoint.open_checkpoint import open_checkpoint
from shardwise.checkpoint.storage import require_content

#: How the names of tensors begin (engine/state.py).
MODEL, OPTIMIZER = "model/", "optim/"


@dataclass(frozen=True)
class Saved:
    """One tensor: its whole shape, its dtype ("float32"), its data's bytes, and its pieces."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    pieces: int


@dataclass(frozen=True)
class Contents:
    """A checkpoint: its tensors by name, its scalars, and how many ranks saved it."""

    path: Path
    ranks: int
    scalars: dict[str, Any]
    tensors: tuple[Saved, ...]

    @property
    def bytes(self) -> int:
        """The data of all tensors, without what the files add."""
        return self.bytes_of("")

    @property
    def parameters(self) -> int:
        """The numbers that the model learns."""
        model = [tensor for tensor in self.tensors if tensor.name.startswith(MODEL)]
        return sum(math.prod(tensor.shape) for tensor in model)

    def bytes_of(self, kind: str) -> int:
        """The data of the tensors whose names begin so: MODEL or OPTIMIZER."""
        return sum(tensor.bytes for tensor in self.tensors if tensor.name.startswith(kind))


def describe(folder: str | os.PathLike[str], deep: bool = False) -> Contents:
    """What the newest checkpoint in `folder` holds; the folder may be one checkpoint's own.

    With `deep` every byte of it is read and compared with what was saved.

    Raises InputError where there is none, or where a file is missing, has another length, is
    damaged or belongs to another checkpoint; wrong bytes of tensors are found by `deep` alone.
    """
    opened = open_checkpoint(find(folder))
    if deep:
        require_content(opened)
    tensors = opened.metadata.state_dict_metadata
    saved = (
        _saved(name, tensor)
        for name, tensor in sorted(tensors.items())
        if isinstance(tensor, TensorStorageMetadata)
    )
    return Contents(opened.path, opened.ranks, opened.scalars, tuple(saved))


def _saved(name: str, tensor: TensorStorageMetadata) -> Saved:
    dtype = tensor.properties.dtype
    size = math.prod(tensor.size) * dtype.itemsize
    text = str(dtype).removeprefix("torch.")
    return Saved(name, tuple(tensor.size), text, size, len(tensor.chunks))
