"""The index of a checkpoint, `.metadata`: a safe reader of the pickle that torch writes.

torch.distributed.checkpoint writes the index as a pickle, and `pickle.load` would call any function
that a pickle names.  This reader accepts only the classes of the index, and creates inert records
for them.  It then checks the records field by field and converts them to torch's classes, so that a
damaged index raises an error here.

    tensor name -> shape, dtype, pieces (offsets, sizes)      every element in exactly one piece
    piece       -> file in the checkpoint's folder, offset, length
"""

import math
import pickle
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.checkpoint.failure import damaged, unread
from shardwise.checkpoint.folder import METADATA
from shardwise.checkpoint.save_plans import check_whole
from shardwise.core.errors import open_regular

_INDEX, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
#: The classes that an index may name, by module; also dtypes.
_CLASSES: Final = {
    _INDEX: {
        *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    _FILES: {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},  # the path at the time of saving, unused
    "pathlib._local": {"PosixPath", "WindowsPath"},
}

#: The most bytes that a piece has in a file besides its values; torch.save writes some 1,200.
HEADERS_BYTES: Final = 2**16


def read_metadata(path: Path) -> Metadata:
    """The names, shapes and file positions of a checkpoint's tensors.

    Imports and calls nothing that the file names.  Raises InputError if the file is damaged, or
    names anything that does not belong in an index.
    """
    file = path / METADATA
    try:
        with open_regular(file) as stream:
            return _index(_Reader(stream).load())
    except OSError as error:
        raise unread(file, error) from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle can raise any error
        raise damaged(file, f"{type(error).__name__}: {error}") from None


class _Inert:
    """An inert object of the pickle: its constructor's arguments, and its state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Unpickles records, dtypes, and Python's numbers, strings and containers."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """A record class for each allowed name. Raises UnpicklingError for other names."""
        if module_name == "torch":
            if global_name == "Size":
                return tuple
            if isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
                return dtype
        if global_name in _CLASSES.get(module_name, ()):
            return type(global_name, (_Inert,), {})
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which is refused")


def _index(found: Any) -> Metadata:
    state = _state(found, "Metadata")
    tensors = {
        _text(name): _tensor(tensor)
        for name, tensor in _mapping(state["state_dict_metadata"]).items()
    }
    places = dict(map(_place, _mapping(state["storage_data"]).items()))
    wanted = {
        MetadataIndex(name, chunk.offsets) for name, t in tensors.items() for chunk in t.chunks
    }
    if wanted != places.keys():
        raise ValueError("pieces and their places do not agree")
    for name, tensor in tensors.items():
        check_whole(name, tensor)
    _require_apart(places.values())
    for name, tensor in tensors.items():
        _require_stored(name, tensor, places)
    return Metadata({**tensors}, storage_data=places)


def _require_stored(
    name: str, tensor: TensorStorageMetadata, places: Mapping[MetadataIndex, _StorageInfo]
) -> None:
    """Raise ValueError if a piece has more bytes than its place in the file, or far fewer."""
    itemsize = tensor.properties.dtype.itemsize
    for chunk in tensor.chunks:
        stored = places[MetadataIndex(name, chunk.offsets)].length
        if not 0 <= stored - math.prod(chunk.sizes) * itemsize <= HEADERS_BYTES:
            raise ValueError(f"'{name}': a piece of {tuple(chunk.sizes)} in {stored} bytes")


def _require_apart(places: Iterable[_StorageInfo]) -> None:
    """Raise ValueError if two pieces overlap in a file."""
    spans = sorted((p.relative_path, p.offset, p.offset + p.length) for p in places)
    for (name, _, end), (other, start, _) in pairwise(spans):
        if name == other and start < end:
            raise ValueError(f"two pieces in the same bytes of {name}")


def _tensor(found: Any) -> TensorStorageMetadata:
    state = _state(found, "TensorStorageMetadata")
    dtype = _state(state["properties"], "TensorProperties")[0]
    size, chunks = _size(state["size"]), list(map(_chunk, state["chunks"]))
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a dtype")
    for chunk in chunks:
        ends = [o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(ends) != len(size) or any(end > n for end, n in zip(ends, size, strict=True)):
            raise ValueError("a piece that reaches beyond its tensor")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _chunk(found: Any) -> ChunkStorageMetadata:
    state = _state(found, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(state["offsets"]), _size(state["sizes"]))


def _place(found: tuple[Any, Any]) -> tuple[MetadataIndex, _StorageInfo]:
    """A piece and its position, which must be in a file of the checkpoint's folder."""
    piece, where = _state(found[0], "MetadataIndex"), _state(found[1], "_StorageInfo")
    name = _text(where["relative_path"])
    if name != Path(name).name or "\\" in name or "\0" in name:
        raise ValueError(f"a file outside the checkpoint's folder, {name!r}")
    (offset, length) = _size((where["offset"], where["length"]))
    index = MetadataIndex(_text(piece["fqn"]), _size(piece["offset"]))
    return index, _StorageInfo(name, offset, length)


def _state(found: Any, kind: str) -> Any:
    """The pickled state of an object of class `kind`."""
    if not isinstance(found, _Inert) or type(found).__name__ != kind or found.state is None:
        raise ValueError(f"no {kind} where one should be")
    return found.state


def _mapping(found: Any) -> Mapping[Any, Any]:
    if not isinstance(found, dict):
        raise ValueError("it describes no tensors")
    return found


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise ValueError("a name that is no text")
    return found


def _size(found: Any) -> torch.Size:
    if not isinstance(found, tuple) or not all(type(n) is int and 0 <= n < 2**63 for n in found):
        raise ValueError("sizes that are no whole numbers")
    return torch.Size(found)
