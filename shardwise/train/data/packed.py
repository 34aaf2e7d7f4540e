"""Tokenised text: one flat file of token numbers, created once, memory-mapped and shared.

    <key>.tokens    the numbers, every document followed by the separator, 16 or 32 bits each
    <key>.json      how many numbers, of how many bits, for how many bytes of text
    <name>.hashes.json    the hashes of the data's files

The key is a hash of the content and of the vocabulary. The .json is written last, by a rename, so
it exists only if the numbers are complete. A file lock lets the first process on a machine create
the files; the others wait for it. A folder that cannot be written is enough if it has them.

A file is hashed again only if it has changed: while its size, times and inode are those of the time
when it was read, its hash is used again. The time of the last change of its inode (ctime), which no
program can set back, is among them. A file that changed in the last seconds before it was read is
hashed again: its next change may get the same time.
"""

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardwise.checkpoint.lock import locked
from shardwise.core.errors import InputError, bad
from shardwise.core.tools.arguments import setting
from shardwise.core.tools.signs_of_life import signs_of_life
from shardwise.train.data.sources import Source, raw
from shardwise.train.data.tokens import (
    ByteVocabulary,
    Vocabulary,
    bpe_size,
    load_tokenizer,
    train_bpe,
)

PROBE = ".shardwise-"  # prefix of temporary files that test whether a folder is writable
FORMAT = "2"  # part of the key; increase it when the format of the files changes

Stream = NDArray[np.unsignedinteger]  # 16 bits per token if the vocabulary allows, else 32


@dataclass(frozen=True)
class Packed:
    """All tokens of a source: the memory-mapped `stream` [tokens]; `text_bytes` in UTF-8."""

    key: str
    stream: Stream
    text_bytes: int
    documents: int
    vocabulary: Vocabulary

    @property
    def bytes_per_token(self) -> float:
        """The mean bytes of text per token, to convert nats per token to bits per byte."""
        return self.text_bytes / len(self.stream)


def tokenise(source: Source, tokens: str, cache: Path) -> Packed:
    """The source's tokens, from `cache` if it has them. Raises InputError for bad input."""
    refused: InputError | None = None
    try:
        make_folder(cache, "data.cache")
    except InputError as error:
        if not cache.is_dir():
            raise
        refused = error
    content = source.digest(lambda files: hashes(files, cache))
    with one_at_a_time(cache / f"{content}.lock"):
        vocabulary = _vocabulary(source, tokens, cache, content, refused)
        mark = f"{FORMAT}/{content}/{vocabulary.name}"
        key = hashlib.blake2b(mark.encode(), digest_size=12).hexdigest()
        about = cache / f"{key}.json"
        if not about.exists():
            if refused is not None:
                raise refused
            _write(source, vocabulary, cache / f"{key}.tokens", about)
    facts = json.loads(about.read_text(encoding="utf-8"))
    stream = np.memmap(cache / f"{key}.tokens", dtype=facts["dtype"], mode="r")
    return Packed(key, stream, facts["text_bytes"], facts["documents"], vocabulary)


def make_folder(folder: Path, what: str) -> None:
    """Create the folder and test that it is writable. The InputError names the key `what`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # a unique name, since other processes may test it too
        with tempfile.TemporaryFile(dir=folder, prefix=PROBE):
            pass
    except OSError as error:
        raise unwritable_folder(folder, what, error) from None


def unwritable_folder(folder: Path, what: str, error: OSError) -> InputError:
    """The error for a folder, set by the key `what`, that cannot be created, read or written."""
    return bad(
        f"{what} = '{folder}', where nothing can be written ({error.strerror})",
        "a folder that you may write to",
        setting(what, Path("runs/NAME")),
    )


def _vocabulary(
    source: Source, tokens: str, cache: Path, content: str, refused: InputError | None
) -> Vocabulary:
    """The vocabulary; trained if the cache lacks it. Raises `refused` if it cannot be written."""
    if tokens == "bytes":
        return ByteVocabulary()
    if not tokens.startswith("bpe:"):
        return load_tokenizer(Path(tokens).expanduser())
    size = bpe_size(tokens)
    path = cache / f"{content}-bpe{size}.tokenizer.json"
    if not path.exists():
        if refused is not None:
            raise refused
        with signs_of_life(lambda: f"training {tokens} on {source.name}"):
            publish(path, train_bpe(source.documents(), size).save)
    return load_tokenizer(path)


def _write(source: Source, vocabulary: Vocabulary, path: Path, about: Path) -> None:
    dtype = np.dtype(np.uint16 if vocabulary.size <= 2**16 else np.uint32)
    facts: dict[str, Any] = {"dtype": dtype.name, "documents": 0, "text_bytes": 0}
    separator = np.array([vocabulary.separator], dtype)

    def write(beside: Path) -> None:
        """Write every document and a separator, and count them."""
        with beside.open("wb") as out:
            for text in source.documents(exact=isinstance(vocabulary, ByteVocabulary)):
                out.write(vocabulary.encode(text).astype(dtype).tobytes())
                out.write(separator.tobytes())
                facts["documents"] += 1
                facts["text_bytes"] += len(raw(text))

    for left in path.parent.glob(f".{path.name}.*"):  # of a process that was killed
        left.unlink()
    mib = 2**20
    with signs_of_life(lambda: f"tokenising {source.name}, {facts['text_bytes'] / mib:,.0f} MiB"):
        publish(path, write)
    if not facts["documents"]:
        path.unlink()
        raise bad(
            f"data.source = '{source.name}', whose documents are all empty",
            "at least one document with text in it",
            'source = "stdlib" under [data], or the path of your own text',
        )
    publish(about, lambda beside: beside.write_text(json.dumps(facts), encoding="utf-8"))


def publish(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path` and rename, so that readers never see a partial file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


#: Younger changes can share their time with a later one: the coarsest clock of a file system.
SETTLED_S: Final = 3.0
LENGTH: Final = hashlib.blake2b().digest_size


State = list[int]  # size, time of change, time of change of the inode, inode
Known = dict[str, tuple[State | None, str]]  # of each path; no state: to be hashed again


def hashes(files: Sequence[Path], cache: Path) -> list[bytes]:
    """The hash of each file's content. Raises OSError for one that cannot be read."""
    paths = [str(file.absolute()) for file in files]
    name = hashlib.blake2b("\0".join(paths).encode(errors="replace"), digest_size=12).hexdigest()
    kept = cache / f"{name}.hashes.json"
    with one_at_a_time(cache / f"{name}.lock"):
        known = _read(kept)
        found: Known = {}
        for path in paths:
            before = known.get(path)
            unchanged = before is not None and before[0] == _state(path)
            found[path] = before if before is not None and unchanged else _hashed(path)
        if found != known:
            text = json.dumps(found)
            with suppress(OSError):  # a cache that cannot be written
                publish(kept, lambda beside: beside.write_text(text, encoding="utf-8"))
    return [bytes.fromhex(found[path][1]) for path in paths]


@contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Wait for the lock `file`; nobody writes in a folder in which it cannot be made."""
    with ExitStack() as held:
        with suppress(OSError):
            held.enter_context(locked(file, math.inf))
        yield


def _hashed(path: str) -> tuple[State | None, str]:
    """The file's state and hash; without the state if it may change unseen."""
    began_ns, state = time.time_ns(), _state(path)
    with Path(path).open("rb") as stream:
        content = hashlib.file_digest(stream, "blake2b").hexdigest()
    settled = began_ns - max(state[1:3]) > SETTLED_S * 1e9 and state == _state(path)
    return (state if settled else None), content


def _state(path: str) -> State:
    found = Path(path).stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _read(kept: Path) -> Known:
    """The file's content; empty if there is none, or it is damaged."""
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
        known = {str(path): (state, str(content)) for path, (state, content) in found.items()}
        return {path: one for path, one in known.items() if len(bytes.fromhex(one[1])) == LENGTH}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
