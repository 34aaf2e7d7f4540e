"""The manifest of a checkpoint: the files of one save, with the hash of each.

    manifest.json   {"format": "shardwise manifest 1", "save": "9f3c...", "step": 100,
                     "files": {"__0_0.distcp": {"bytes": 4096, "sha256": "..."}, ...},
                     "sha256": "..."}                         of everything above

It is written last.  `save` is a random id of the save, also in scalars.json.  Hashes reveal a file
that is damaged, missing, or from another save, even of the same step of the same run.

When saving, each rank hashes the files it has written.  When loading, the ranks share the hashing
of all files, before anything is written into an engine.
"""

import hashlib
import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.failure import damaged, foreign, unread
from shardwise.checkpoint.metadata import read_metadata
from shardwise.checkpoint.piece import pieces_of, read_piece
from shardwise.core.errors import InputError, open_regular, read_text

FORMAT: Final = "shardwise manifest 1"
#: Bytes of the largest manifest, some 400,000 files.
MOST_BYTES: Final = 2**26
#: The most tensors that an error names.
NAMED: Final = 3


@dataclass(frozen=True)
class Seal:
    """The length and the SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of one save, by name."""

    save: str
    step: int
    files: Mapping[str, Seal]

    def text(self) -> str:
        """The text of the manifest's file."""
        body: dict[str, Any] = {"format": FORMAT, "save": self.save, "step": self.step}
        body["files"] = {name: asdict(seal) for name, seal in sorted(self.files.items())}
        body["sha256"] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        return json.dumps(body, indent=2) + "\n"


def seal(file: Path) -> Seal:
    """The length and hash of a file."""
    with open_regular(file) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return Seal(stream.tell(), digest)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest into the checkpoint's folder."""
    (path / folders.MANIFEST).write_text(manifest.text(), encoding="utf-8")


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises InputError if it is missing, damaged or belongs to a checkpoint of another step.
    """
    file = path / folders.MANIFEST
    try:
        text = read_text(file, MOST_BYTES)
    except OSError as error:
        raise unread(file, error) from None
    except ValueError as error:
        raise damaged(file, str(error)) from None
    try:
        body = json.loads(text)
        files = {name: Seal(**each) for name, each in body["files"].items()}
        manifest = Manifest(body["save"], body["step"], files)
        same = manifest.text() == text and all(name == Path(name).name for name in files)
        same &= type(manifest.step) is int and type(manifest.save) is str
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        same = False
    if not same:
        raise damaged(file, "its own hash does not match")
    if folders.is_named_by_step(path) and folders.step_of(path) != manifest.step:
        raise foreign(file, f"it is of step {manifest.step}")
    return manifest


def require_sizes(path: Path, manifest: Manifest) -> None:
    """Raise InputError unless every file exists with its length.  Reads no file."""
    for name, sealed in manifest.files.items():
        file = path / name
        try:
            found = file.stat()
        except OSError as error:
            raise unread(file, error) from None
        if not stat.S_ISREG(found.st_mode):
            raise damaged(file, "it is no regular file")
        if found.st_size != sealed.bytes:
            raise damaged(file, f"it has {found.st_size} bytes and should have {sealed.bytes}")


def require_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read these files, and raise InputError unless each has its hash."""
    for name in names:
        file = path / name
        if name not in manifest.files:
            raise damaged(path / folders.MANIFEST, f"it does not name {name}")
        if _sealed(file) != manifest.files[name]:
            why = "its SHA-256 is not the one in the manifest"
            raise damaged(file, why + _damaged_tensors(path, manifest, name))


def _sealed(file: Path) -> Seal:
    """The length and hash of a file.  Raises InputError if it cannot be read."""
    try:
        return seal(file)
    except OSError as error:
        raise unread(file, error) from None


def _damaged_tensors(path: Path, manifest: Manifest, name: str) -> str:
    """The tensors that cannot be read from a damaged file; "" if the index is damaged too."""
    index = path / folders.METADATA
    try:
        if seal(index) != manifest.files[index.name]:
            return ""
        pieces = pieces_of(path, read_metadata(path))
    except (OSError, KeyError, InputError):
        return ""
    tensors: set[str] = set()
    for place, piece in pieces.items():
        if piece.file.name == name:
            try:
                read_piece(piece)
            except InputError:
                tensors.add(place.fqn)
    first = ", ".join(sorted(tensors)[:NAMED])
    more = f" and {len(tensors) - NAMED} more" if len(tensors) > NAMED else ""
    return f"; damaged tensors: {first}{more}" if tensors else ""
