"""Tokenised text: one flat file of token numbers, created once, memory-mapped and shared.

    <key>.tokens    the numbers, every document followed by the separator, 16 or 32 bits each
    <key>.json      how many numbers, of how many bits, for how many bytes of text, and their hash

The key is a hash of the vocabulary and of the sizes and times of the files, among them ctime, which
no program can set back. The identity of the data is the hash of its tokens, so copies of files on
other hosts are the same data. The .json is written last, by a rename, so it exists only if the
numbers are complete. A file lock lets the first process on a machine create the files; the others
wait for it. A complete cache may be read-only.
"""

import hashlib
import json
import math
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.checkpoint.folder import write_file
from shardwise.checkpoint.lock import locked
from shardwise.core.errors import bad
from shardwise.core.tools.arguments import setting
from shardwise.core.tools.signs_of_life import signs_of_life
from shardwise.train.data.sources import CHAT, Source, raw
from shardwise.train.data.tokens import (
    ByteVocabulary,
    Vocabulary,
    bpe_size,
    chat_vocabulary,
    load_tokenizer,
    train_bpe,
)

PROBE = ".shardwise-"  # prefix of temporary files that test whether a folder is writable
FORMAT = "3"  # part of the key; increase it when the format of the files changes
BATCH = 2**20  # characters that are encoded together

Stream = NDArray[np.unsignedinteger]  # 16 bits per token if the vocabulary allows, else 32
Encoded = tuple[bytes, int, int]  # numbers; of how many documents, of how many bytes of text


@dataclass(frozen=True)
class Packed:
    """All tokens of the sources: the memory-mapped `stream` [tokens]; `text_bytes` in UTF-8.
    `key` is the identity of the tokens. The tokens of source k end before `ends[k]`.
    """

    key: str
    stream: Stream
    text_bytes: int
    documents: int
    vocabulary: Vocabulary
    ends: Sequence[int] = ()

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / len(self.stream)


def tokenise(sources: Sequence[Source], tokens: str, cache: Path, trained: int = 1) -> Packed:
    """The sources' tokens; a `bpe:SIZE` is of the first `trained` ones. Raises InputError."""
    states = [source.state for source in sources]
    with using_folder(cache, "data.cache"), one_at_a_time(cache / f"{_hash(states)}.lock"):
        cache.mkdir(parents=True, exist_ok=True)
        vocabulary = _vocabulary(sources[:trained], tokens, cache)
        key = _hash([FORMAT, states, vocabulary.name])
        about = cache / f"{key}.json"
        if not about.exists():
            _write(sources, vocabulary, cache / f"{key}.tokens", about)
        facts = json.loads(about.read_text(encoding="utf-8"))
        stream = np.memmap(cache / f"{key}.tokens", dtype=facts.pop("dtype"), mode="r")
    return Packed(stream=stream, vocabulary=vocabulary, **facts)


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


def _vocabulary(sources: Sequence[Source], tokens: str, cache: Path) -> Vocabulary:
    """The vocabulary; trained if the cache lacks it."""
    if sources[0].field == CHAT:
        return chat_vocabulary(tokens)
    if tokens == "bytes":
        return ByteVocabulary()
    if not tokens.startswith("bpe:"):
        return load_tokenizer(Path(tokens).expanduser())
    size = bpe_size(tokens)
    path = cache / f"{_hash([source.state for source in sources])}-bpe{size}.tokenizer.json"
    if not path.exists():
        probe(cache)  # before the text is read
        with signs_of_life(lambda: f"training {tokens} on {_names(sources)}"):
            documents = chain.from_iterable(source.documents() for source in sources)
            write_file(path, train_bpe(documents, size).save)
    return load_tokenizer(path)


def _write(sources: Sequence[Source], vocabulary: Vocabulary, path: Path, about: Path) -> None:
    largest = max(vocabulary.size - 1, vocabulary.separator)
    dtype = np.dtype(np.uint16 if largest < 2**16 else np.uint32)
    facts: dict[str, Any] = {"dtype": dtype.name, "documents": 0, "text_bytes": 0, "ends": []}
    digest = hashlib.blake2b(vocabulary.name.encode(), digest_size=12)
    separator, exact = np.array([vocabulary.separator], dtype), vocabulary.name == "bytes"

    def encode(texts: Sequence[str]) -> Encoded:
        numbers = [
            part for one in vocabulary.encode(texts) for part in (one.astype(dtype), separator)
        ]
        return np.concatenate(numbers).tobytes(), len(texts), sum(len(raw(text)) for text in texts)

    def write(beside: Path) -> None:
        """Write and count the documents of each source."""
        with beside.open("wb") as out:
            for source in sources:
                for numbers, documents, size in _ahead(encode, _batches(source.documents(exact))):
                    out.write(numbers)
                    digest.update(numbers)
                    facts["documents"] += documents
                    facts["text_bytes"] += size
                facts["ends"].append(out.tell() // dtype.itemsize)

    for left in path.parent.glob(f".{path.name}.*"):  # of a process that was killed
        left.unlink()
    mib, name = 2**20, _names(sources)
    with signs_of_life(lambda: f"tokenising {name}, {facts['text_bytes'] / mib:,.0f} MiB"):
        write_file(path, write)
    starts = [0, *facts["ends"]]
    if empty := [s.name for s, a, b in zip(sources, starts, starts[1:], strict=False) if a == b]:
        path.unlink()
        raise bad(
            f"data.source = '{empty[0]}', whose documents are all empty",
            "at least one document with text in it",
            'source = "stdlib" under [data], or the path of your own text',
        )
    digest.update(str(facts["ends"]).encode())
    facts["key"] = digest.hexdigest()
    write_file(about, lambda beside: beside.write_text(json.dumps(facts), encoding="utf-8"))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts, about `BATCH` characters at a time."""
    batch, size = list[str](), 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _ahead(
    encode: Callable[[Sequence[str]], Encoded], batches: Iterable[list[str]]
) -> Iterator[Encoded]:
    """The results in order; two threads are at work, of which one converts while one encodes."""
    with ThreadPoolExecutor(2) as threads:
        running = deque[Future[Encoded]]()
        for texts in batches:
            running.append(threads.submit(encode, texts))
            if len(running) > 2:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def _names(sources: Sequence[Source]) -> str:
    return ", ".join(source.name for source in sources)


def _hash(of: object) -> str:
    return hashlib.blake2b(json.dumps(of).encode(), digest_size=12).hexdigest()


@contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Wait for the lock `file`; nobody writes in a folder in which it cannot be made."""
    with ExitStack() as held:
        with suppress(OSError):
            held.enter_context(locked(file, math.inf))
        yield
