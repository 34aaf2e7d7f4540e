"""Checkpoints with right hashes and absurd contents, and special files in place of files."""

import io
import json
import os
import pickle
import resource
import signal
import socket
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from shardwise.checkpoint.folder import METADATA, SCALARS
from shardwise.checkpoint.metadata import read_metadata
from tests.checkpoint.damage import reseal

Absurd = Callable[[Path], object]
#: A tensor of the saved model that one piece holds.
TENSOR = "model/blocks.0.up.bias"
MANY = 2**42  # elements: 16 TB and more
LITTLE_BYTES = 2**28  # less than any absurd size


def with_index(change: Callable[[Metadata, Any, MetadataIndex], object]) -> Absurd:
    """Change the index: the whole of it, one tensor in it, and the name of its first piece."""

    def act(path: Path) -> None:
        metadata = read_metadata(path)
        tensor: Any = metadata.state_dict_metadata[TENSOR]
        change(metadata, tensor, MetadataIndex(TENSOR, tensor.chunks[0].offsets))
        (path / METADATA).write_bytes(pickle.dumps(metadata))
        reseal(path)

    return act


def place(metadata: Metadata, piece: MetadataIndex, **values: Any) -> None:
    """Say another place of a piece."""
    assert metadata.storage_data is not None
    metadata.storage_data[piece] = replace(metadata.storage_data[piece], **values)


def reshape(_: Metadata, tensor: Any, piece: MetadataIndex, size: int = MANY) -> None:
    """Another number of elements, in one piece."""
    tensor.size = torch.Size((size,))
    tensor.chunks[:] = [replace(tensor.chunks[0], sizes=tensor.size)]


def remove_piece(metadata: Metadata, tensor: Any, piece: MetadataIndex) -> None:
    assert metadata.storage_data is not None
    del metadata.storage_data[piece], tensor.chunks[0]


def with_piece(make: Callable[[torch.Tensor], bytes]) -> Absurd:
    """Put other bytes in the place of a piece, made from the tensor that is in it."""

    def act(path: Path) -> None:
        metadata = read_metadata(path)
        tensor: Any = metadata.state_dict_metadata[TENSOR]
        piece = MetadataIndex(TENSOR, tensor.chunks[0].offsets)
        content = make(torch.zeros(tensor.chunks[0].sizes, dtype=tensor.properties.dtype))
        file = path / metadata.storage_data[piece].relative_path
        place(metadata, piece, offset=file.stat().st_size, length=len(content))
        file.write_bytes(file.read_bytes() + content)
        (path / METADATA).write_bytes(pickle.dumps(metadata))
        reseal(path)

    return act


def stored(value: Any) -> bytes:
    """The value as torch.save writes it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def archive(pickled: bytes) -> bytes:
    """An archive of torch with this pickle, and no values."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as records:
        records.writestr("archive/data.pkl", pickled)
    return file.getvalue()


def packed(content: bytes, length: int) -> bytes:
    """The archive with its records packed, and with `length` zeros as values."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            plain = zipfile.ZIP_STORED if name.endswith("data.pkl") else None
            values = bytes(length) if name.endswith("data/0") else old.read(name)
            new.writestr(name, values, plain)
    return file.getvalue()


def with_scalars(change: Callable[[dict[str, Any]], object]) -> Absurd:
    """Change scalars.json."""

    def act(path: Path) -> None:
        said = json.loads((path / SCALARS).read_text())
        change(said)
        (path / SCALARS).write_text(json.dumps(said))
        reseal(path)

    return act


def with_engine(**values: Any) -> Absurd:
    """Other numbers of the engine."""
    return with_scalars(lambda said: said["scalars"]["engine"].update(values))


#: Each with what the error says of it.
ABSURD: dict[str, tuple[Absurd, str]] = {
    "a shape of 16 TB": (with_index(reshape), "a piece of"),
    "a shape beyond 64 bits": (with_index(lambda m, t, p: reshape(m, t, p, 2**62)), "a piece of"),
    "an offset beyond the file": (
        with_index(lambda m, _, p: place(m, p, offset=2**50)),
        "should have 11258",
    ),
    "a length beyond the file": (
        with_index(lambda m, _, p: place(m, p, length=2**50)),
        "in \\d+ bytes|same bytes",
    ),
    "a negative offset": (with_index(lambda m, _, p: place(m, p, offset=-1)), "no whole numbers"),
    "an offset that is text": (with_index(lambda m, _, p: place(m, p, offset="9")), "no whole"),
    "a device as a file": (
        with_index(lambda m, _, p: place(m, p, relative_path="/dev/zero")),
        "outside the checkpoint's folder",
    ),
    "the piece twice": (
        with_index(lambda _m, t, _p: t.chunks.append(t.chunks[0])),
        "two boxes hold the element",
    ),
    "no piece": (with_index(remove_piece), "boxes hold 0 elements"),
    "no place": (
        with_index(lambda m, _, p: m.storage_data.pop(p)),
        "do not agree",
    ),
    "two pieces in one place": (
        with_index(lambda m, _t, _p: [place(m, other, offset=0) for other in m.storage_data or {}]),
        "in the same bytes",
    ),
    "another dtype in the index": (
        with_index(
            lambda _m, t, _p: setattr(t, "properties", replace(t.properties, dtype=torch.int8))
        ),
        "another shape or dtype|in \\d+ bytes|was saved with, int8",
    ),
    "another dtype in the piece": (
        with_piece(lambda x: stored(x.to(torch.int64))),
        "another shape or dtype",
    ),
    "another shape in the piece": (with_piece(lambda x: stored(x[None])), "another shape or dtype"),
    "a piece that repeats one value 2^42 times": (
        with_piece(lambda x: stored(x[:1].clone().expand(MANY))),
        "another shape or dtype",
    ),
    "a sparse tensor as a piece": (with_piece(lambda x: stored(x.to_sparse())), "it names"),
    "a tensor without values as a piece": (with_piece(lambda x: stored(x.to("meta"))), "it names"),
    "a dict as a piece": (with_piece(lambda x: stored({"w": x})), "no plain tensor"),
    "a piece that unpacks to 32 MB": (with_piece(lambda x: packed(stored(x), 2**25)), "is packed"),
    "a piece that asks for 1 TB": (
        with_piece(
            lambda _: archive(b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\0\0\0\0\0\1\x85R.")
        ),
        "it names __builtin__.bytearray",
    ),
    "a piece far longer than its values": (
        with_piece(lambda x: stored(x) + bytes(2**17)),
        "a piece of",
    ),
    "a piece without a pickle": (with_piece(lambda _: archive(b"")[:90]), "not a zip file"),
    **{
        f"step {step!r}": (
            with_scalars(lambda said, step=step: said["scalars"].update(step=step)),
            "its step is|of another step",
        )
        for step in (-1, 10**30, "7", None, 2.0, 3)
    },
    "no ranks": (with_scalars(lambda said: said.update(ranks=-4)), "ranks or scalars"),
}
#: Numbers and states of the engine, which only an engine reads.
NUMBERS: dict[str, tuple[Absurd, str]] = {
    "a negative counter": (with_engine(since=-1), "without a number for since"),
    "a counter beyond 64 bits": (with_engine(since=2**70), "without a number for since"),
    "a text as a step of the engine": (with_engine(step="2"), "without a number for step"),
    "an infinite loss scale": (with_engine(loss_scale=float("inf")), "number for loss_scale"),
    "groups in a list": (with_engine(groups=[1]), "of another form"),
    "groups of numbers": (with_engine(groups={"default": {"lr": 1}}), "of another form"),
    "states in a list": (with_engine(states=[]), "of another form"),
    "a state that is a number": (
        with_engine(states={"blocks.0.up.bias": 7}),
        "scalars.json', which is damaged",
    ),
}


def special(file: Path, kind: str) -> None:
    """Put a special file in place of a file."""
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = Path.cwd()
            os.chdir(file.parent)  # the name of a socket has at most 107 bytes
            made.bind(file.name)
            os.chdir(here)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to({"loop": file.name, "device": "/dev/zero", "dangling": "nowhere"}[kind])


@contextmanager
def limits(seconds: int = 20) -> Iterator[None]:
    """Nothing in the block allocates much, and nothing waits."""

    def late(*_: object) -> None:
        raise AssertionError(f"not refused in {seconds} seconds")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + LITTLE_BYTES, before[1])
    )
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
