"""Text sources, each as one deterministic sequence of documents.

"stdlib" is the source of this Python's standard library, and a .txt file is a document. Other files
have one document a row, in `field`; a folder or a glob is read in sorted order. `hf:NAME[:SPLIT]`
is a data set of the Hub, or a folder that is laid out like one. The library `datasets` reads all
but text, as a stream: only its tokens are stored. A conversation, a list of messages in the field
`messages`, is a document of JSON.

Text is UTF-8. In a .txt file, with `exact`, for a vocabulary of bytes, bytes that are not UTF-8
become lone surrogates (PEP 383), which `raw` converts back.
"""

import glob
import json
import math
import os
import sysconfig
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from shardwise.core.errors import InputError, bad, one_line

#: The name that `datasets` has for the files of a suffix.
KINDS = {".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
SUFFIXES = (".txt", *KINDS)
HUB = "hf:"
FORMS = (
    "'stdlib', a .txt, .jsonl, .parquet or .arrow file, a folder of them, a glob, or "
    "hf:NAME[:SPLIT] for a data set of the Hub or a folder like one"
)
TEXT_COLUMNS = ("string", "large_string")  # as `datasets` names types
CHAT = "messages"  # the field of conversations
ROWS = 1000  # that are read at once
# folders without the library's own source: installed packages, tests, tables of data
LEFT_OUT = frozenset(
    (
        *("site-packages", "dist-packages", "__pycache__"),
        *("test", "tests", "idle_test"),
        *("encodings", "pydoc_data"),
    )
)


@dataclass(frozen=True)
class Source:
    """About `most_bytes` of a source in reading order, and the field with the text: `files`, or
    the `split` of a data set that `datasets` has found (`builder`).
    """

    name: str
    files: tuple[Path, ...]
    field: str
    most_bytes: float = math.inf
    builder: Any = None
    split: str = "train"

    @property
    def cut(self) -> bool:
        """Whether `most_bytes` may leave a part out."""
        limited = self.most_bytes < math.inf
        sizes = (file.stat().st_size for file in self.files)
        return limited and (self.builder is not None or sum(sizes) > self.most_bytes)

    @property
    def state(self) -> list[Any]:
        """What changes with the content. Raises InputError for files that cannot be read."""
        part = [self.field, self.most_bytes if self.cut else ""]
        if self.builder is not None:
            files = self.builder.config.data_files[self.split]
            return [*part, *files, *files.origin_metadata]
        try:
            found = [(str(file.absolute()), file.stat()) for file in self.files]
        except OSError as error:
            raise unreadable(error.filename or self.name, error) from None
        return [*part, *((at, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for at, s in found)]

    def documents(self, exact: bool = False) -> Iterator[str]:
        """The documents in order, without empty ones; `exact` preserves all bytes."""
        left = self.most_bytes
        for text in self._texts("surrogateescape" if exact else "strict"):
            if text:
                yield text
            left -= len(text)
            if left <= 0:
                return

    def _texts(self, errors: str) -> Iterator[str]:
        if self.builder is not None:
            yield from _rows(self.builder, self.split, self.name, self.field)
        for suffix, files in groupby(self.files, lambda file: file.suffix):
            if suffix not in KINDS:
                yield from (_text(file, errors, self.most_bytes) for file in files)
            else:
                names = [str(file) for file in files]
                made = _builder(names[0], KINDS[suffix], [glob.escape(name) for name in names])
                yield from _rows(made, "train", names[0], self.field)


def raw(text: str) -> bytes:
    """The bytes of an `exact` document, UTF-8 of other text."""
    return text.encode("utf-8", errors="surrogateescape")


def find(source: str, field: str) -> Source:
    """The files of a `source`, or its data set. Raises InputError if none has any content."""
    if source.startswith(HUB):
        return _data_set(source, field)
    try:
        files = _standard_library() if source == "stdlib" else _user_files(source)
        written = any(file.stat().st_size for file in files)
    except OSError as error:  # no permission, or a name that is too long
        raise unreadable(source, error) from None
    if not written:
        raise bad(f"data.source = '{source}', without any text", FORMS, _instead())
    return Source(source, tuple(files), field)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    kept = [file for file in files if not LEFT_OUT & set(file.parts)]
    # sorted by parts, so the order is the same on all machines and file systems
    return [root / file for file in sorted(kept, key=lambda file: file.parts)]


def _user_files(source: str) -> list[Path]:
    path = Path(os.path.expanduser(source))  # noqa: PTH111 (which raises for ~NAME of nobody)
    if path.is_file():
        if path.suffix not in SUFFIXES:
            given = f"data.source = '{source}', whose name ends in none of {', '.join(SUFFIXES)}"
            raise bad(given, FORMS, "the same text in a .txt file")
        return [path]
    pattern = f"{glob.escape(str(path))}/**/*" if path.is_dir() else str(path)
    found = map(Path, glob.glob(pattern, recursive=True))  # noqa: PTH207 (absolute globs too)
    files = [file for file in found if file.suffix in SUFFIXES and file.is_file()]
    if not files:
        given = f"data.source = '{source}', where no {', '.join(SUFFIXES)} file is"
        raise bad(given, FORMS, _instead())
    return sorted(files, key=lambda file: file.parts)


def unreadable(what: str | Path, error: OSError) -> InputError:
    return bad(f"{what}, which cannot be read ({error.strerror or error})", FORMS, _instead())


def _text(file: Path, errors: str, most_bytes: float) -> str:
    try:
        if file.stat().st_size <= most_bytes:
            return file.read_bytes().decode("utf-8", errors)
        with file.open("rb") as stream:  # the beginning may end within a character
            return stream.read(int(most_bytes)).decode("utf-8", errors="ignore")
    except OSError as error:
        raise unreadable(file, error) from None
    except UnicodeError as error:
        raise bad(
            f"{file}, which is not UTF-8 ({error})",
            "text in UTF-8; data.tokens = 'bytes' accepts any bytes",
            "iconv -f latin1 -t utf-8 on the file, for example, or --set data.tokens=bytes",
        ) from None


# --- what the library `datasets` reads ----------------------------------------------------------


def _data_set(source: str, field: str) -> Source:
    """`hf:NAME`, `hf:NAME:SPLIT` or `hf:NAME:SUBSET:SPLIT`, in which NAME may be a folder."""
    name, *parts = source.removeprefix(HUB).split(":")
    split = parts[-1] if parts else "train"
    builder = _builder(source, name, subset=parts[0] if len(parts) > 1 else None)
    splits = list(builder.config.data_files or {})
    if split not in splits:
        allowed, instead = f"one of its splits ({', '.join(splits)})", f"{HUB}{name}:{splits[0]}"
        raise bad(f"data.source = '{source}', without the split '{split}'", allowed, instead)
    return Source(source, (), field, builder=builder, split=split)


def _builder(
    what: str, kind: str, files: list[str] | None = None, subset: str | None = None
) -> Any:
    """The files of a data set and their format; nothing is read yet."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise bad(
            f"{what}, which only datasets can read, and datasets is not installed",
            "other files than .txt with the extra `data`",
            "pip install datasets",
        ) from None
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # an error is one paragraph, below
    with _explained(what):
        return datasets.load_dataset_builder(kind, subset, data_files=files)


def _rows(builder: Any, split: str, what: str, field: str) -> Iterator[str]:
    with _explained(what):
        stream = builder.as_streaming_dataset(split=split)
        kinds = {name: getattr(kind, "dtype", "") for name, kind in (stream.features or {}).items()}
        textual = [name for name, dtype in kinds.items() if dtype in TEXT_COLUMNS]
        if field in (*textual, CHAT) and field in kinds:
            stream = stream.select_columns(field)
        for rows in stream.iter(batch_size=ROWS):
            texts: list[Any] = rows.get(field, [0])
            if field == CHAT:
                texts = [json.dumps(each) if isinstance(each, list) else None for each in texts]
            if not all(isinstance(text, str | None) for text in texts):
                raise bad(
                    f"{what}, which has no text in the field '{field}'",
                    f"a field with text in every row (here: {', '.join(textual[:8]) or 'none'})",
                    f"data.field = '{textual[0]}'" if textual else '{"text": "..."}',
                )
            yield from (text or "" for text in texts)


@contextmanager
def _explained(what: str) -> Generator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 (the errors of datasets, pyarrow, the Hub, ...)
        why = one_line(f"{type(error).__name__}: {error}")[:300]
        raise bad(f"{what}, which datasets cannot read ({why})", FORMS, _instead()) from None


def _instead() -> str:
    return (
        "--set data.source=stdlib, or the path of your own text such as "
        '--set data.source=notes.txt (in a file: source = "notes.txt" under [data])'
    )
