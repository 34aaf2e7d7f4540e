"""Checkpoints on disk that are damaged on purpose."""

import io
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from shardwise.checkpoint.folder import MANIFEST
from shardwise.checkpoint.manifest import Manifest, Seal, read_manifest, seal, write_manifest

#: What an error about a file of tensors says before it names those that are damaged.
TENSORS = "damaged tensors: "
#: Damages of one kind at places of the seed.
FLIPS, CUTS, HOLES = 60, 4, 4


class Damage(NamedTuple):
    """What is done to a checkpoint's folder, and what the error must say.

    files     names of files, one of which the error names
    tensor    a part of the error
    """

    name: str
    act: Callable[[Path], object]
    files: Sequence[str]
    tensor: str = ""


class Values(NamedTuple):
    """The bytes of a file that are the values of one tensor, as torch finds them."""

    file: str
    start: int
    stop: int
    tensor: str


def damages(whole: Path, step: Path, run: Path, seed: int) -> Iterator[Damage]:
    """Every kind of damage to every file, at places of the seed.

    `step` is the checkpoint of another step beside this one; `run` is that of the same step of
    another run.
    """
    places = random.Random(seed)
    names = sorted(path.name for path in whole.iterdir())
    yield from _bits(whole, names, places)
    for name in names:
        yield from _of_one(whole / name, places)
    for name, other in permutations(names, 2):
        yield Damage(f"{other} in place of {name}", _copy(whole / other, name), [name])
    for pair in combinations(names, 2):
        yield Damage(f"{pair} exchanged", lambda path, p=pair: exchange(path, *p), pair)
        yield Damage(f"{pair} gone", lambda path, p=pair: [(path / n).unlink() for n in p], pair)
    yield from _mixtures(names, step, run)
    yield from _manifests(read_manifest(whole))


def _bits(whole: Path, names: Sequence[str], places: random.Random) -> Iterator[Damage]:
    """Single bits of every file, and of every tensor in every file."""
    every = list(values_of(whole))
    bits = [
        (n, places.randrange(8 * (whole / n).stat().st_size)) for n in names for _ in range(FLIPS)
    ]
    bits += [(v.file, places.randrange(8 * v.start, 8 * v.stop)) for v in every]
    for name, bit in bits:
        hit = (v.tensor for v in every if v.file == name and v.start <= bit // 8 < v.stop)
        tensor = next((TENSORS + name for name in hit), "")
        yield Damage(f"{name} bit {bit}", lambda p, n=name, b=bit: flip(p / n, b), [name], tensor)


def values_of(path: Path) -> Iterator[Values]:
    """Where the values of tensors are."""
    index = FileSystemReader(path).read_metadata()
    for piece, place in index.storage_data.items():
        with (path / place.relative_path).open("rb") as stream:
            stream.seek(place.offset)
            reader: Any = torch._C.PyTorchFileReader
            archive = reader(io.BytesIO(stream.read(place.length)))
        start = place.offset + archive.get_record_offset("data/0")
        size = len(archive.get_record("data/0"))
        yield Values(place.relative_path, start, start + size, piece.fqn)


def _of_one(file: Path, places: random.Random) -> Iterator[Damage]:
    """Of one file: its length, its bytes, its kind, and that it is missing."""
    name, content = file.name, file.read_bytes()
    size, tensor = len(content), TENSORS if file.suffix == ".distcp" else ""
    lengths = {0, 1, size // 2, size - 1, *(places.randrange(size) for _ in range(CUTS))}
    for length in lengths:
        yield Damage(f"{name} cut to {length}", _write(name, content[:length]), [name])
    for count in (1, size):
        yield Damage(f"{name}, {count} more", _write(name, content + content[:count]), [name])
    for start in (places.randrange(size) for _ in range(HOLES)):
        hole = bytes(~byte & 255 for byte in content[start : start + 512])
        torn = content[:start] + hole + content[start + 512 :]
        yield Damage(f"{name} torn at {start}", _write(name, torn), [name])
    yield Damage(f"{name} of zeros", _write(name, bytes(size)), [name], tensor)
    yield Damage(f"{name} gone", lambda path: (path / name).unlink(), [name])
    yield Damage(f"{name} renamed", lambda path: rename(path / name), [name])
    yield Damage(f"{name} a folder", lambda path: to_folder(path / name), [name])


def _mixtures(names: Sequence[str], step: Path, run: Path) -> Iterator[Damage]:
    """Files of two checkpoints in one folder.

    The manifest distinguishes two checkpoints of one step: if it comes from the other checkpoint,
    the error may name any file.
    """
    yield Damage("all of another step", _copies(step, names), [MANIFEST])
    for chosen in [*combinations(names, 1), *combinations(names, 2)]:
        rest = [name for name in names if name not in chosen]
        either = names if MANIFEST in chosen else chosen
        yield Damage(f"{chosen} of another step", _copies(step, chosen), chosen)
        yield Damage(f"{chosen} of another run", _copies(run, chosen), either)
        yield Damage(f"all but {chosen} of another step", _copies(step, rest), rest)
    for name in names:
        rest = [other for other in names if other != name]
        wrong = names if name == MANIFEST else [name]
        yield Damage(f"all but {name} of another run", _copies(run, rest), wrong)


def _manifests(right: Manifest) -> Iterator[Damage]:
    """Manifests with a right hash of their own that say something wrong."""
    wrong = {"save": replace(right, save="0" * 32), "step": replace(right, step=right.step + 1)}
    for what, manifest in wrong.items():
        files = [MANIFEST, "scalars.json"]
        yield Damage(f"another {what}", lambda p, m=manifest: write_manifest(p, m), files)
    for name, sealed in right.files.items():
        less = {other: each for other, each in right.files.items() if other != name}
        for what, changed in {
            "no": less,
            "another hash of": {**right.files, name: replace(sealed, sha256="0" * 64)},
            "another length of": {**right.files, name: replace(sealed, bytes=sealed.bytes + 1)},
            "a second": {**right.files, f"_{name}": Seal(sealed.bytes, sealed.sha256)},
        }.items():
            manifest = replace(right, files=changed)
            files = [MANIFEST, name, f"_{name}"]
            yield Damage(f"{what} {name}", lambda p, m=manifest: write_manifest(p, m), files)


def _write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(content)


def _copy(file: Path, name: str) -> Callable[[Path], object]:
    return lambda path: shutil.copy(file, path / name)


def _copies(source: Path, names: Sequence[str]) -> Callable[[Path], object]:
    return lambda path: [shutil.copy(source / name, path / name) for name in names]


def flip(file: Path, bit: int) -> None:
    """Turn one bit over."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def to_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def rename(file: Path) -> None:
    file.rename(file.with_name(f"{file.name}.old"))


def exchange(path: Path, name: str, other: str) -> None:
    """The content of each in the place of the other."""
    content = (path / name).read_bytes()
    (path / name).write_bytes((path / other).read_bytes())
    (path / other).write_bytes(content)


def reseal(path: Path) -> None:
    """Make the manifest fit the files, as somebody would who means harm."""
    manifest = read_manifest(path)
    files = {name: seal(path / name) for name in manifest.files}
    write_manifest(path, Manifest(manifest.save, manifest.step, files))
