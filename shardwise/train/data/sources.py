"""Text sources: files on this machine, as one deterministic sequence of documents.

"stdlib" is the source of this Python's standard library. A .jsonl file has one document per line,
and a .parquet one per row, in `field`; a folder or a glob is read in sorted order.

Text is UTF-8. With `exact`, for a vocabulary of bytes, bytes that are not UTF-8 become lone
surrogates (PEP 383), which `raw` converts back.
"""

import glob
import json
import math
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.core.errors import InputError, bad

SUFFIXES = (".txt", ".jsonl", ".parquet")
FORMS = "'stdlib', or a .txt, .jsonl or .parquet file, a folder of them, or a glob"
TEXT_COLUMNS = ("string", "large_string", "dictionary<values=string")  # as pyarrow prints types
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
    """About `most_bytes` of files in reading order, and the field with the text."""

    name: str
    files: tuple[Path, ...]
    field: str
    most_bytes: float = math.inf

    @property
    def cut(self) -> bool:
        """Whether `most_bytes` leaves a part of the files out."""
        limited = self.most_bytes < math.inf
        return limited and sum(file.stat().st_size for file in self.files) > self.most_bytes

    def documents(self, exact: bool = False) -> Iterator[str]:
        """The documents in order, without empty ones; `exact` preserves all bytes."""
        left = self.most_bytes
        for file in self.files:
            for text in _read(file, self, exact):
                if text:
                    yield text
                left -= len(text)
                if left <= 0:
                    return


def raw(text: str) -> bytes:
    """The bytes of an `exact` document, UTF-8 of other text; other lone surrogates become '?'."""
    try:
        return text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError:
        known = re.sub("[\ud800-\udc7f\udd00-\udfff]", "?", text)
        return known.encode("utf-8", errors="surrogateescape")


def find(source: str, field: str) -> Source:
    """The files of a `source`. Raises InputError if none has any content."""
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


def _read(file: Path, source: Source, exact: bool) -> Iterator[str]:
    errors = "surrogateescape" if exact else "strict"
    try:
        if file.suffix == ".jsonl":
            yield from _jsonl(file, source.field, errors)
        elif file.suffix == ".parquet":
            yield from _parquet(file, source.field)
        else:
            yield _text(file, errors, source.most_bytes)
    except OSError as error:
        raise unreadable(file, error) from None
    except UnicodeError as error:
        raise bad(
            f"{file}, which is not UTF-8 ({error})",
            "text in UTF-8; data.tokens = 'bytes' accepts any bytes",
            "iconv -f latin1 -t utf-8 on the file, for example, or --set data.tokens=bytes",
        ) from None


def _text(file: Path, errors: str, most_bytes: float) -> str:
    if file.stat().st_size <= most_bytes:
        return file.read_bytes().decode("utf-8", errors)
    with file.open("rb") as stream:  # the beginning may end within a character
        return stream.read(int(most_bytes)).decode("utf-8", errors="ignore")


def _jsonl(file: Path, field: str, errors: str) -> Iterator[str]:
    with file.open(encoding="utf-8", errors=errors) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _field(line, field, f"{file}, line {number}")


def _field(line: str, field: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        given = f"{where}, which is not JSON ({error})"
        raise bad(given, "one object a line", '{"text": "..."}') from None
    values = row if isinstance(row, dict) else {}
    if not isinstance(values.get(field), str):
        raise _no_text(where, field, [key for key, v in values.items() if isinstance(v, str)])
    return values[field]


def _no_text(where: str, field: str, others: list[str]) -> InputError:
    """The error for a row whose `field` has no text; `others` are its fields with text."""
    return bad(
        f"{where}, which has no text in the field '{field}'",
        f"a field with text in every row (here: {', '.join(others[:8]) or 'none'})",
        f"data.field = '{others[0]}'" if others else '{"text": "..."}',
    )


def _parquet(file: Path, field: str) -> Iterator[str]:
    pq = _pyarrow(file)
    try:
        table = pq.ParquetFile(file)
    except ValueError as error:  # pyarrow's ArrowInvalid is a ValueError
        raise bad(f"{file}, which is not Parquet ({error})", FORMS, _instead()) from None
    columns = table.schema_arrow
    textual = [column.name for column in columns if str(column.type).startswith(TEXT_COLUMNS)]
    if field not in textual:
        raise _no_text(str(file), field, textual)
    try:
        for rows in table.iter_batches(columns=[field]):
            yield from (text or "" for text in rows.column(0).to_pylist())
    except ValueError as error:
        raise bad(f"{file}, which is damaged ({error})", FORMS, _instead()) from None


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise bad(
            f"{file}, which only pyarrow can read, and pyarrow is not installed",
            "Parquet with the extra `parquet`, or .txt and .jsonl without it",
            "pip install pyarrow",
        ) from None
    return pyarrow.parquet


def _instead() -> str:
    return (
        "--set data.source=stdlib, or the path of your own text such as "
        '--set data.source=notes.txt (in a file: source = "notes.txt" under [data])'
    )
