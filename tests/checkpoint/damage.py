"""Checkpoints on disk that are damaged on purpose, or absurd behind right hashes."""

import os
import pickle
import random
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from shardwise.checkpoint.folder import MANIFEST, METADATA
from shardwise.checkpoint.open_checkpoint import (
    Manifest,
    read_manifest,
    read_metadata,
    seal,
    write_manifest,
)

Act = Callable[[Path], object]


class Damage(NamedTuple):
    """What is done to a checkpoint's folder, and the files one of which the error must name."""

    name: str
    act: Act
    files: Sequence[str]


def damages(whole: Path, others: Sequence[Path], seed: int) -> Iterator[Damage]:
    """Every kind of damage to every file, at places of the seed. `others` are the checkpoints of
    another step of this run, and of the same step of another one.
    """
    places = random.Random(seed)
    names = sorted(path.name for path in whole.iterdir())
    for name in names:
        content = (whole / name).read_bytes()
        size = len(content)
        for bit in (places.randrange(8 * size) for _ in range(50)):
            act = lambda path, name=name, bit=bit: flip(path / name, bit)  # noqa: E731
            yield Damage(f"{name} bit {bit}", act, [name])
        at = places.randrange(size)
        torn = content[:at] + bytes(~byte & 255 for byte in content[at : at + 512])
        cuts = [content[:length] for length in {0, 1, size // 2, size - 1, places.randrange(size)}]
        foreign = [(whole / other).read_bytes() for other in names if other != name]
        for text in (*cuts, content + b"x", 2 * content, torn + content[at + 512 :], *foreign):
            yield Damage(f"{name} is {text[:9]}, {len(text)}", _write(name, text), [name])
        yield Damage(f"{name} of zeros", _write(name, bytes(size)), [name])
        yield Damage(f"{name} gone", lambda path, name=name: (path / name).unlink(), [name])
        for other in others:
            # two checkpoints of one step differ by the manifest: the error may name any file
            wrong = names if name == MANIFEST and other.name == whole.name else [name]
            text = (other / name).read_bytes()
            yield Damage(f"{name} of {other}", _write(name, text), wrong)
    yield from _manifests(read_manifest(whole))


def _manifests(right: Manifest) -> Iterator[Damage]:
    """Manifests with a right hash of their own that say something wrong."""
    step = right.scalars["step"] + 1
    wrong = {"no save": replace(right, save=7), "step": replace(right, scalars={"step": step})}
    for name, sealed in right.files.items():
        for what, changed in {
            "no": {},
            "another hash of": {name: replace(sealed, sha256="0" * 64)},
            "another length of": {name: replace(sealed, bytes=sealed.bytes + 1)},
            "a second": {name: sealed, f"_{name}": sealed},
        }.items():
            rest = {other: each for other, each in right.files.items() if other != name}
            wrong[f"{what} {name}"] = replace(right, files=rest | changed)
    for what, manifest in wrong.items():
        name = what.split()[-1]
        named = [MANIFEST, name, f"_{name}"]
        yield Damage(what, lambda path, m=manifest: write_manifest(path, m), named)


def _write(name: str, content: bytes) -> Act:
    return lambda path: (path / name).write_bytes(content)


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def reseal(path: Path) -> None:
    """Make the manifest fit the files, as somebody would who means harm."""
    manifest = read_manifest(path)
    files = {name: seal(path / name) for name in manifest.files}
    write_manifest(path, replace(manifest, files=files))


# --- absurd contents ----------------------------------------------------------------------------

#: A tensor of the saved model that one piece holds.
TENSOR = "model/0.bias"


def index(change: Callable[[Metadata, Any, MetadataIndex], object]) -> Act:
    """Change the index: the whole of it, one tensor in it, and the name of its first piece."""

    def act(path: Path) -> None:
        metadata = read_metadata(path)
        tensor: Any = metadata.state_dict_metadata[TENSOR]
        change(metadata, tensor, MetadataIndex(TENSOR, tensor.chunks[0].offsets))
        (path / METADATA).write_bytes(pickle.dumps(metadata))
        reseal(path)

    return act


def placed(**values: Any) -> Act:
    return index(lambda metadata, _, piece: place(metadata, piece, **values))


def place(metadata: Any, piece: MetadataIndex, **values: Any) -> None:
    metadata.storage_data[piece] = replace(metadata.storage_data[piece], **values)


def scalars(change: Callable[[dict[str, Any]], object], **values: Any) -> Act:
    def act(path: Path) -> None:
        manifest = read_manifest(path)
        change(manifest.scalars)
        write_manifest(path, replace(manifest, **values))

    return act


def numbered(**values: Any) -> Act:
    return scalars(lambda said: said["engine"].update(values))


def stepped(step: Any) -> Act:
    return scalars(lambda said: said.update(step=step))


def without(metadata: Any, tensor: Any, piece: MetadataIndex) -> None:
    del metadata.storage_data[piece], tensor.chunks[0]


#: Each with what the error says of it.
ABSURD: dict[str, tuple[Act, str]] = {
    "a device as a file": (placed(relative_path="/dev/zero"), "outside the checkpoint's folder"),
    "the piece twice": (
        index(lambda _, t, __: t.chunks.append(t.chunks[0])),
        "two boxes hold the element",
    ),
    "no piece": (index(without), "boxes hold 0 elements"),
    "no place": (index(lambda m, _, p: m.storage_data.pop(p)), "KeyError"),
    **{f"step {step!r}": (stepped(step), "its step is") for step in (-1, 10**30, "7", 3)},
    "no ranks": (scalars(len, ranks=-4), "its ranks or"),
}
#: Numbers and states of the engine, which only an engine reads.
NUMBERS: dict[str, tuple[Act, str]] = {
    "a negative counter": (numbered(since=-1), "of another form"),
    "a text as a step of the engine": (numbered(step="2"), "of another form"),
    "an infinite loss scale": (numbered(loss_scale=float("inf")), "of another form"),
    "groups in a list": (numbered(groups=[1]), "of another form"),
    "a state that is a number": (
        numbered(states={"0.bias": 7}),
        "manifest.json', which is damaged",
    ),
}


# --- special files ------------------------------------------------------------------------------


def special(file: Path, kind: str) -> None:
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
    """Nothing in the block allocates much, less than any absurd size, and nothing waits."""

    def late(*_: object) -> None:
        raise AssertionError(f"not refused in {seconds} seconds")

    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (held + 2**28, before[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
