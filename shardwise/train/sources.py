"""Where text comes from: files on this machine, as one deterministic sequence of documents.

"stdlib"              the source of this Python's standard library
notes.txt             one document
data.jsonl            one document a line, in the field that is named
data.parquet          one document a row, in the column that is named (extra `parquet`)
a folder, a glob      every such file in it, in sorted order
"""

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.core.errors import InputError, bad

SUFFIXES = (".txt", ".jsonl", ".parquet")
FORMS = "'stdlib', or a .txt, .jsonl or .parquet file, a folder of them, or a glob"
# what is not the library's own program text: installed packages, tests, and tables of data
LEFT_OUT = frozenset(
    (
        *("site-packages", "dist-packages", "__pycache__"),
        *("test", "tests", "idle_test"),
        *("encodings", "pydoc_data"),
    )
)


@dataclass(frozen=True)
class Source:
    """Files in reading order, and the field of .jsonl and .parquet that holds the text."""

    name: str
    files: tuple[Path, ...]
    field: str

    def documents(self) -> Iterator[str]:
        """The documents in order, without those that are empty. Raises InputError for bad ones."""
        for file in self.files:
            yield from (text for text in _read(file, self.field) if text)

    def digest(self) -> str:
        """A hash of what the files contain, in their order; not of where they lie."""
        total = hashlib.blake2b(self.field.encode(), digest_size=16)
        for file in self.files:
            with file.open("rb") as stream:
                total.update(hashlib.file_digest(stream, "blake2b").digest())
            total.update(file.suffix.encode())
        return total.hexdigest()


def find(source: str, field: str) -> Source:
    """The files that `source` stands for. Raises InputError where there is none with content."""
    files = _standard_library() if source == "stdlib" else _user_files(source)
    if not files:
        raise bad(f"data.source = '{source}', where no such file is", FORMS, _instead())
    if not any(file.stat().st_size for file in files):
        raise bad(
            f"data.source = '{source}', where every file is empty ({len(files)} files)",
            "files with text in them",
            _instead(),
        )
    return Source(source, tuple(files), field)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    kept = [file for file in files if not LEFT_OUT & set(file.parts)]
    # sorted by parts: the order is that of the names, on any machine and file system
    return [root / file for file in sorted(kept, key=lambda file: file.parts)]


def _user_files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            given = f"data.source = '{source}', whose name ends in none of {', '.join(SUFFIXES)}"
            raise bad(given, FORMS, "the same text in a .txt file")
        return [path]
    pattern = f"{glob.escape(str(path))}/**/*" if path.is_dir() else str(path)
    found = map(Path, glob.glob(pattern, recursive=True))  # noqa: PTH207 (absolute globs too)
    return sorted(
        (file for file in found if file.suffix in SUFFIXES and file.is_file()),
        key=lambda file: file.parts,
    )


def _read(file: Path, field: str) -> Iterator[str]:
    try:
        if file.suffix == ".jsonl":
            yield from _jsonl(file, field)
        elif file.suffix == ".parquet":
            yield from _parquet(file, field)
        else:
            yield file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise bad(f"{file}, which cannot be read ({error.strerror})", FORMS, _instead()) from None


def _jsonl(file: Path, field: str) -> Iterator[str]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _field(line, field, f"{file}, line {number}")


def _field(line: str, field: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise bad(
            f"{where}, which is not JSON ({error})", "one object a line", '{"text": "..."}'
        ) from None
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        raise _no_field(where, field, list(row) if isinstance(row, dict) else [])
    return row[field]


def _no_field(where: str, field: str, there: list[str]) -> InputError:
    return bad(
        f"{where}, which has no text in the field '{field}'",
        f"data.field names one of its fields: {', '.join(there) or 'it has none'}",
        f"data.field = '{there[0]}'" if there else '{"text": "..."} on each line',
    )


def _parquet(file: Path, field: str) -> Iterator[str]:
    pq = _pyarrow(file)
    try:
        table = pq.ParquetFile(file)
    except ValueError as error:  # pyarrow's ArrowInvalid is a ValueError
        raise bad(f"{file}, which is not Parquet ({error})", FORMS, _instead()) from None
    if field not in table.schema_arrow.names:
        raise _no_field(str(file), field, table.schema_arrow.names)
    for rows in table.iter_batches(columns=[field]):
        for text in rows.column(0).to_pylist():
            if text is not None and not isinstance(text, str):
                raise _no_field(str(file), field, table.schema_arrow.names)
            yield text or ""


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise bad(
            f"{file}, which only pyarrow can read, and pyarrow is not installed",
            "Parquet with the extra `parquet`, or .txt and .jsonl without it",
            "pip install 'shardwise[parquet]'",
        ) from None
    return pyarrow.parquet


def _instead() -> str:
    return 'source = "stdlib" under [data], or the path of your own text'
