"""One piece of a tensor: the bytes of a file in which torch.save wrote it, as a tensor.

A piece is a zip archive, with a pickle and the values.  Nothing is unpacked or called that a plain
tensor does not need, so that no content can allocate more than its own length.
"""

import io
import os
import pickletools
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shardwise.checkpoint.failure import damaged
from shardwise.checkpoint.folder import open_regular

#: What the pickle of a plain tensor names: its dtype, by a class of storage or itself, and these.
_NAMES: Final = re.compile(
    r"torch\._utils _rebuild_tensor_v[23]|collections OrderedDict|torch \w+Storage|torch [a-z]\w*"
    r"|torch\.storage UntypedStorage"
)
#: The operations of a pickle that name a function or a class.
_NAMING: Final = ("GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")


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


def read_piece(piece: Piece) -> Tensor:
    """The tensor of a piece.

    Raises InputError for a damaged one, and for one with another shape or dtype in it.
    """
    try:
        tensor = _tensor(_bytes(piece))
        if tensor.shape != piece.sizes or tensor.dtype != piece.dtype:
            raise ValueError(f"a piece of {tuple(piece.sizes)} has another shape or dtype in it")
    except Exception as error:  # noqa: BLE001 - a damaged archive can raise any error
        why = str(error).split("\n")[0] or type(error).__name__
        raise damaged(piece.file, why) from None
    return tensor


def _bytes(piece: Piece) -> bytes:
    end = piece.offset + piece.length
    with open_regular(piece.file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < end:
            raise ValueError(f"it has {size} bytes and should have {end} or more")
        stream.seek(piece.offset)
        return stream.read(piece.length)


def _tensor(content: bytes) -> Tensor:
    """The tensor in an archive.  Raises an error of any kind for another content."""
    with zipfile.ZipFile(io.BytesIO(content)) as records:
        unpacked = sum(record.file_size for record in records.infolist())
        if unpacked > len(content):  # torch stores its records as they are
            raise ValueError(f"a piece of {len(content)} bytes unpacks to {unpacked}")
        # without checksums if the program has switched them off
        checked = torch.serialization.get_crc32_options()
        if wrong := records.testzip() if checked else None:
            raise ValueError(f"the checksum of {wrong} does not match")
        pickled = next(name for name in records.namelist() if name.endswith("/data.pkl"))
        for operation, name, _ in pickletools.genops(records.read(pickled)):
            if operation.name in _NAMING and not _NAMES.fullmatch(str(name)):
                raise ValueError(f"it names {name}, which no tensor does")
    piece = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if type(piece) is not Tensor or piece.layout is not torch.strided or not piece.is_cpu:
        raise ValueError("it has no plain tensor")
    return piece
