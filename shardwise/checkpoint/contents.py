"""The contents of a checkpoint, from its small files; `deep` verifies every byte."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardwise.checkpoint.folder import find
from shardwise.checkpoint.open_checkpoint import open_checkpoint
from shardwise.checkpoint.storage import require_content

#: Prefixes of tensor names (engine/state/state.py).
MODEL, OPTIMIZER = "model/", "optim/"


@dataclass(frozen=True)
class SavedTensor:
    """One tensor: its full shape, dtype ("float32"), bytes, and number of pieces."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    pieces: int


@dataclass(frozen=True)
class Contents:
    """A checkpoint: its tensors by name, its scalars, and the number of ranks that saved it."""

    path: Path
    ranks: int
    scalars: dict[str, Any]
    tensors: tuple[SavedTensor, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all tensors, without file headers."""
        return self.bytes_of("")

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        model = [tensor for tensor in self.tensors if tensor.name.startswith(MODEL)]
        return sum(math.prod(tensor.shape) for tensor in model)

    def bytes_of(self, kind: str) -> int:
        """The bytes of the tensors with that prefix: MODEL or OPTIMIZER."""
        return sum(tensor.bytes for tensor in self.tensors if tensor.name.startswith(kind))


def describe(folder: str | os.PathLike[str], deep: bool = False) -> Contents:
    """The contents of the newest checkpoint in `folder`, or of `folder` if it is a checkpoint.

    With `deep`, every byte is read and compared with its hash.

    Raises InputError if there is no checkpoint, or a file is missing, has another length, is
    damaged or belongs to another checkpoint. Only `deep` finds wrong bytes inside tensors.
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


def _saved(name: str, tensor: TensorStorageMetadata) -> SavedTensor:
    dtype = tensor.properties.dtype
    size = math.prod(tensor.size) * dtype.itemsize
    text = str(dtype).removeprefix("torch.")
    return SavedTensor(name, tuple(tensor.size), text, size, len(tensor.chunks))
