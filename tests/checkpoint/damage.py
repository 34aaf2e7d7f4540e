"""Checkpoints on disk that are damaged on purpose."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from shardwise.checkpoint.folder import SCALARS
from shardwise.checkpoint.manifest import MANIFEST, Manifest, read_manifest, seal, write_manifest

#: What is done to a checkpoint's folder; the second folder is that of another step.
Damage = Callable[[Path, Path], object]


def damages(whole: Path, seed: int, flips: int) -> Iterator[tuple[str, Damage]]:
    """Every kind of damage to every file, each with its name; bits flip at places of the seed."""
    places = random.Random(seed)
    names = sorted(path.name for path in whole.iterdir())
    for name in names:
        size = (whole / name).stat().st_size
        for _ in range(flips):
            bit = places.randrange(8 * size)
            yield f"{name} bit {bit}", lambda path, _, n=name, b=bit: flip(path / n, b)
        for length in {0, 1, size // 2, size - 1}:
            yield f"{name} cut to {length}", lambda path, _, n=name, k=length: cut(path / n, k)
        yield f"{name} longer", lambda path, _, n=name: append(path / n)
        yield f"{name} gone", lambda path, _, n=name: (path / n).unlink()
        yield f"{name} a folder", lambda path, _, n=name: to_folder(path / n)
        yield f"{name} foreign", lambda path, other, n=name: swap(path, other, n)
        yield f"{name} renamed", lambda path, _, n=name: rename(path / n)
    pieces = [name for name in names if name.endswith(".distcp")]
    yield "two files exchanged", lambda path, _: exchange(path / pieces[0], path / pieces[1])
    yield "all but the manifest foreign", lambda p, o: [swap(p, o, n) for n in names[:-1]]
    yield "numbers and manifest foreign", lambda p, o: [swap(p, o, n) for n in (SCALARS, MANIFEST)]
    yield "the folder of another step", lambda p, o: [swap(p, o, n) for n in names]


def flip(file: Path, bit: int) -> None:
    """Turn one bit over."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def cut(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])


def append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def to_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def swap(path: Path, other: Path, name: str) -> None:
    shutil.copy(other / name, path / name)


def rename(file: Path) -> None:
    file.rename(file.with_name(f"{file.name}.old"))


def exchange(file: Path, other: Path) -> None:
    """The content of each in the place of the other."""
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


def reseal(path: Path) -> None:
    """Make the manifest fit the files, as somebody would who means harm."""
    manifest = read_manifest(path)
    files = {name: seal(path / name) for name in manifest.files}
    write_manifest(path, Manifest(manifest.save, manifest.step, files))
