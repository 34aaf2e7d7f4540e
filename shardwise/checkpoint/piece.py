"""One piece of a tensor in a file, as torch.save writes it, read without calling anything.

    a zip archive, of which no record is packed
    data.pkl     shape, strides, dtype, and the record with the values
    data/0       the values
    byteorder    "little"

torch.load reads more than plain tensors, and allocates what a pickle asks for.  This reader accepts
only the pickle of a plain tensor with the shape and dtype in the checkpoint's index, and reads no
more than the tensor's own bytes.
"""

import io
import math
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shardwise.checkpoint.failure import damaged, unread
from shardwise.core.errors import open_regular

#: The header of a record in a zip archive: its length, without the name and the extra field after
#: it, whose lengths are its last two numbers.
RECORD_BYTES: Final = 30
#: The dtypes that a pickle names by a class of storage; it names newer ones themselves.
STORAGES: Final = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


@dataclass(frozen=True)
class Piece:
    """Where a piece is: `length` bytes of a file, with a tensor of these sizes and dtype."""

    file: Path
    offset: int
    length: int
    sizes: torch.Size
    dtype: torch.dtype


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
            found[index] = Piece(file, place.offset, place.length, chunk.sizes, dtype)
    return found


@dataclass(frozen=True)
class _Stored:
    """A tensor's values: their record, the first element in it, and the strides."""

    record: str
    dtype: torch.dtype
    first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def end(self) -> int:
        """One more than the last element that the tensor has in its record."""
        if not math.prod(self.sizes):
            return 0
        return (
            1 + self.first + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        )


def check_piece(piece: Piece) -> None:
    """Raise InputError unless it is a tensor of the right shape and dtype.  Reads no values."""
    with _opened(piece) as (stream, records):
        _find(piece, stream, records)


def read_piece(piece: Piece) -> Tensor:
    """The tensor of a piece.  Raises InputError for a damaged one."""
    with _opened(piece) as (stream, records):
        stored, values = _find(piece, stream, records)
        content = _read(stream, piece, values)
        # without checksums if the program has switched them off
        if torch.serialization.get_crc32_options() and zlib.crc32(content) != values.CRC:
            raise ValueError(f"the checksum of {values.filename} does not match")
    if not math.prod(piece.sizes):
        return torch.empty(piece.sizes, dtype=piece.dtype, device="cpu")
    flat = torch.frombuffer(content, dtype=piece.dtype)
    return flat.as_strided(stored.sizes, stored.strides, stored.first)


@contextmanager
def _opened(piece: Piece) -> Iterator[tuple[BufferedReader, zipfile.ZipFile]]:
    """The file, and the archive in it.  Any error is one for a damaged file."""
    try:
        with open_regular(piece.file) as stream:
            size, end = os.fstat(stream.fileno()).st_size, piece.offset + piece.length
            if size < end:
                raise ValueError(f"it has {size} bytes and should have {end} or more")
            with zipfile.ZipFile(_Window(stream, piece.offset, piece.length)) as records:
                yield stream, records
    except OSError as error:
        raise unread(piece.file, error) from None
    except Exception as error:  # noqa: BLE001 - a damaged archive can raise any error
        why = str(error).split("\n")[0] or type(error).__name__
        raise damaged(piece.file, why) from None


def _find(
    piece: Piece, stream: BufferedReader, records: zipfile.ZipFile
) -> tuple[_Stored, zipfile.ZipInfo]:
    """The description of the tensor, and the record of its values.  Raises ValueError."""
    named = {info.filename.partition("/")[2]: info for info in records.infolist()}
    stored = _PieceReader(io.BytesIO(_read(stream, piece, named["data.pkl"]))).load()
    if not isinstance(stored, _Stored):
        raise ValueError("it has no plain tensor")
    if stored.sizes != tuple(piece.sizes) or stored.dtype != piece.dtype:
        raise ValueError(f"a piece of {tuple(piece.sizes)} has another shape or dtype in it")
    if "byteorder" in named and _read(stream, piece, named["byteorder"]).decode() != sys.byteorder:
        raise ValueError("its values are in another order of bytes")
    values = named[f"data/{stored.record}"]
    if stored.end() * piece.dtype.itemsize > values.file_size:
        raise ValueError(f"a piece of {tuple(piece.sizes)} in {values.file_size} bytes")
    return stored, values


def _read(stream: BufferedReader, piece: Piece, record: zipfile.ZipInfo) -> bytearray:
    """The content of a record, which is not packed, and lies in the piece."""
    stream.seek(piece.offset + record.header_offset)
    lengths = struct.unpack("<26xHH", stream.read(RECORD_BYTES))
    start = record.header_offset + RECORD_BYTES + sum(lengths)
    if record.compress_type != zipfile.ZIP_STORED or start + record.file_size > piece.length:
        raise ValueError(f"{record.filename} is packed, or longer than the piece")
    stream.seek(piece.offset + start)
    content = bytearray(record.file_size)
    if stream.readinto(content) < len(content):
        raise ValueError("it ends too early")
    return content


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, stream: BufferedReader, start: int, length: int) -> None:
        self.stream, self.start, self.length = stream, start, length
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move as in any file."""
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        self.position = max(0, begin + offset)
        return self.position

    def readinto(self, buffer: Any, /) -> int:
        """Read up to the end of the part."""
        count = max(0, min(len(buffer), self.length - self.position))
        self.stream.seek(self.start + self.position)
        count = self.stream.readinto(memoryview(buffer)[:count])
        self.position += count
        return count


class _PieceReader(pickle.Unpickler):
    """Unpickles the description of a plain tensor."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """What stands for the names of a plain tensor. Raises UnpicklingError for other names."""
        name = f"{module_name}.{global_name}"
        plain = {"torch._utils._rebuild_tensor_v2": _v2, "torch._utils._rebuild_tensor_v3": _v3}
        if name in plain:
            return plain[name]
        if name == "collections.OrderedDict":  # of hooks, of which there are none
            return dict
        if name == "torch.storage.UntypedStorage":
            return torch.uint8
        named = STORAGES.get(global_name, global_name)
        dtype = getattr(torch, named, None) if module_name == "torch" else None
        if not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"it names {name}, which no plain tensor does")
        return dtype

    def persistent_load(self, pid: Any) -> Any:
        """The record of a storage, and its dtype."""
        _, dtype, record, _, _ = pid
        return record, dtype


def _v2(storage: Any, first: Any, sizes: Any, strides: Any, *_: Any) -> _Stored:
    record, dtype = storage
    numbers = (first, *sizes, *strides)
    if len(sizes) != len(strides) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("sizes that are no whole numbers")
    return _Stored(record, dtype, first, tuple(sizes), tuple(strides))


def _v3(
    storage: Any, first: Any, sizes: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> _Stored:
    """As `_v2`, of a dtype that has no class of storage."""
    return _v2((storage[0], dtype), first, sizes, strides)
