"""Tokenised text: one flat file of token numbers, created once, memory-mapped and shared.

    <key>.tokens    the numbers, every document followed by the separator, 16 or 32 bits each
    <key>.json      how many numbers, of how many bits, for how many bytes of text
    <name>.digest   the hash of the data's files

The key is a hash of the content and of the vocabulary. The .json is written last, by a rename, so
it exists only if the numbers are complete. A file lock lets the first process on a machine create
the files; the others wait for it. A complete cache may be read-only.

Files are hashed again only if the size, inode or times of one have changed, among them ctime, which
no program can set back. The hash of files that changed in the last seconds is not kept, since a
next change may get the same time.
"""

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardwise.checkpoint.folder import write_file
from shardwise.checkpoint.lock import locked
from shardwise.core.errors import InputError, bad
from shardwise.core.tools.arguments import setting
from shardwise.core.tools.signs_of_life import signs_of_life
from shardwise.train.data.sources import Source, raw, unreadable
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
    content = digest(source, cache)
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
    with using_folder(folder, what):
        folder.mkdir(parents=True, exist_ok=True)
        probe(folder)


def probe(folder: Path) -> None:
    """Raise OSError unless a file can be made in the folder."""
    # a unique name, since other processes may test it too
    with tempfile.TemporaryFile(dir=folder, prefix=PROBE):
        pass


@contextmanager
def using_folder(folder: Path, what: str) -> Iterator[None]:
    """Any OSError in the block is an InputError about the folder that the key `what` sets."""
    try:
        yield
    except OSError as error:
        raise bad(
            f"{what} = '{folder}', where nothing can be written ({error.strerror})",
            "a folder that you may write to",
            setting(what, Path("runs/NAME")),
        ) from None


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
            write_file(path, train_bpe(source.documents(), size).save)
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
        write_file(path, write)
    if not facts["documents"]:
        path.unlink()
        raise bad(
            f"data.source = '{source.name}', whose documents are all empty",
            "at least one document with text in it",
            'source = "stdlib" under [data], or the path of your own text',
        )
    write_file(about, lambda beside: beside.write_text(json.dumps(facts), encoding="utf-8"))


#: Younger changes can share their time with a later one: the coarsest clock of a file system.
SETTLED_NS: Final = 3 * 10**9


def digest(source: Source, cache: Path) -> str:
    """A hash of the contents of the source's files in order, independent of their paths."""
    if source.cut:  # it is not read as a whole for its hash either
        return _hash([source.field, str(source.files)])
    try:
        found = [(str(file.absolute()), file.stat()) for file in source.files]
        states = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in found]
        kept = cache / f"{_hash([source.field, states])}.digest"
        changed_ns = max(max(s.st_mtime_ns, s.st_ctime_ns) for _, s in found)
        settled = time.time_ns() - changed_ns > SETTLED_NS
        with one_at_a_time(kept.with_suffix(".lock")):
            if kept.is_file():
                return kept.read_text(encoding="utf-8")
            text = _hash([source.field, [_content(file) + file.suffix for file in source.files]])
            if settled:
                _keep(kept, text)
            return text
    except OSError as error:
        raise unreadable(error.filename or source.name, error) from None


def _keep(file: Path, text: str) -> None:
    with suppress(OSError):  # a cache that cannot be written
        write_file(file, lambda beside: beside.write_text(text, encoding="utf-8"))


def _content(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def _hash(of: object) -> str:
    return hashlib.blake2b(json.dumps(of).encode(), digest_size=16).hexdigest()


@contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Wait for the lock `file`; nobody writes in a folder in which it cannot be made."""
    with ExitStack() as held:
        with suppress(OSError):
            held.enter_context(locked(file, math.inf))
        yield
