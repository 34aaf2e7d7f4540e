"""The index of a checkpoint, `.metadata`, and the pieces of tensors that it names.

    tensor name -> shape, dtype, pieces (offsets, sizes)      every element in exactly one piece
    piece       -> file in the checkpoint's folder, offset, length

torch.distributed.checkpoint writes the index as a pickle, and `pickle.load` would call any function
that a pickle names. This reader constructs nothing but the index's own classes, and torch.load
reads pieces with weights_only. So a checkpoint from elsewhere runs no code.
"""

import io
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shardwise.checkpoint.folder import METADATA, damaged, unread
from shardwise.checkpoint.save_plans import check_whole
from shardwise.core.errors import open_regular

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
    file = path / METADATA
    try:
        with open_regular(file) as stream:
            metadata: Metadata = _Reader(stream).load()
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            check_whole(name, tensor)
        pieces_of(path, metadata)
    except OSError as error:
        raise unread(file, error) from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle can raise any error
        raise damaged(file, f"{type(error).__name__}: {error}") from None
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
    try:
        with open_regular(piece.file) as stream:
            if os.fstat(stream.fileno()).st_size < piece.offset + piece.length:
                raise ValueError(f"it has less than {piece.offset + piece.length} bytes")
            stream.seek(piece.offset)
            content = io.BytesIO(stream.read(piece.length))
        found = torch.load(content, map_location="cpu", weights_only=True)
        if (found.shape, found.dtype) != (piece.sizes, piece.dtype):
            raise ValueError("a tensor in it has another shape or dtype than in the index")
    except OSError as error:
        raise unread(piece.file, error) from None
    except Exception as error:  # noqa: BLE001 - a damaged archive can raise any error
        why = str(error).split("\n")[0] or type(error).__name__
        raise damaged(piece.file, why) from None
    return found
