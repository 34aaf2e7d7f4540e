"""Text sources: files on this machine, as one deterministic sequence of documents.

"stdlib"              the source of this Python's standard library
notes.txt             one document
data.jsonl            one document a line, in the field that is named
data.parquet          one document a row, in the column that is named (extra `parquet`)
a folder, a glob      every such file in it, in sorted order

Bytes become text by the encoding that is named. Read `exact`, for a vocabulary of bytes, they keep
their values instead: what is not UTF-8 becomes lone surrogates (PEP 383), of which `raw` makes the
same bytes again.
"""

import codecs
import glob
import hashlib
import json
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
    """Files in reading order, the field of .jsonl and .parquet that holds the text, the encoding.

    .parquet holds text in UTF-8 whatever `encoding` says.
    """

    name: str
    files: tuple[Path, ...]
    field: str
    encoding: str = "utf-8"

    def documents(self, exact: bool = False) -> Iterator[str]:
        """The documents in order, without those that are empty; `exact` as the module says.

        Raises InputError for a file that cannot be read, with the place of the first byte that is
        not of the encoding.
        """
        for file in self.files:
            yield from (text for text in _read(file, self, exact) if text)

    def digest(self) -> str:
        """A hash of the files' contents in order, independent of their paths."""
        how = f"{self.field}/{self.encoding}"
        total = hashlib.blake2b(how.encode(errors="replace"), digest_size=16)
        for file in self.files:
            try:
                with file.open("rb") as stream:
                    total.update(hashlib.file_digest(stream, "blake2b").digest())
            except OSError as error:
                raise _unreadable(file, error) from None
            total.update(file.suffix.encode())
        return total.hexdigest()


def raw(text: str) -> bytes:
    """The bytes that an `exact` document was read from; UTF-8 of any other text.

    A lone surrogate that no byte was read as, such as JSON can write, becomes '?'.
    """
    try:
        return text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError:
        known = re.sub("[\ud800-\udc7f\udd00-\udfff]", "?", text)
        return known.encode("utf-8", errors="surrogateescape")


def find(source: str, field: str, encoding: str = "utf-8") -> Source:
    """The files that `source` stands for.

    Raises InputError where there is none with content, and for an encoding there is not.
    """
    _require_encoding(encoding)
    try:
        files = _standard_library() if source == "stdlib" else _user_files(source)
        written = any(file.stat().st_size for file in files)
    except OSError as error:  # a folder that may not be looked into, a name that is too long
        raise _unreadable(source, error) from None
    if not written:
        raise bad(
            f"data.source = '{source}', "
            + ("which is empty" if len(files) == 1 else f"whose {len(files)} files are all empty"),
            f"{FORMS}, with text in it",
            _instead(),
        )
    return Source(source, tuple(files), field, encoding)


def _require_encoding(encoding: str) -> None:
    try:
        "".encode(encoding)
    except (LookupError, ValueError):
        raise bad(
            f"data.encoding = '{encoding}', which is no encoding of text that Python knows",
            "utf-8, utf-16, latin-1, cp1252, shift_jis, gb18030 or another of Python's codecs",
            "data.encoding = 'utf-8'",
        ) from None


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    kept = [file for file in files if not LEFT_OUT & set(file.parts)]
    # sorted by parts: the order is that of the names, on any machine and file system
    return [root / file for file in sorted(kept, key=lambda file: file.parts)]


def _user_files(source: str) -> list[Path]:
    path = _at_home(source)
    if path.is_file():
        if path.suffix not in SUFFIXES:
            given = f"data.source = '{source}', whose name ends in none of {', '.join(SUFFIXES)}"
            raise bad(given, FORMS, "the same text in a .txt file")
        return [path]
    pattern = f"{glob.escape(str(path))}/**/*" if path.is_dir() else str(path)
    found = map(Path, glob.glob(pattern, recursive=True))  # noqa: PTH207 (absolute globs too)
    there = sorted((file for file in found if file.is_file()), key=lambda file: file.parts)
    files = [file for file in there if file.suffix in SUFFIXES]
    if not files:
        raise _nothing_fits(source, path, there)
    return files


def _at_home(source: str) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError:  # ~NAME of nobody on this machine
        return Path(source)


def _nothing_fits(source: str, path: Path, there: list[Path]) -> InputError:
    """The answer to a path without a file that can be read; `there` are the files it leads to."""
    ends = ", ".join(SUFFIXES[:-1]) + f" or {SUFFIXES[-1]}"
    if path.is_dir():
        what = f"a folder with no {ends} file in it"
        what += f" (but {there[0].name}, for example)" if there else ", nor any other"
    elif there:
        what = f"which fits no {ends} file (but {there[0].name}, for example)"
    elif path.exists():
        what = "which is neither a file nor a folder"
    else:
        what = "where no such file is"
    return bad(f"data.source = '{source}', {what}", FORMS, _instead())


def _unreadable(what: str | Path, error: OSError) -> InputError:
    return bad(f"{what}, which cannot be read ({error.strerror or error})", FORMS, _instead())


def _read(file: Path, source: Source, exact: bool) -> Iterator[str]:
    errors = "surrogateescape" if exact else "strict"
    try:
        if file.suffix == ".jsonl":
            yield from _jsonl(file, source, errors)
        elif file.suffix == ".parquet":
            yield from _parquet(file, source.field)
        else:  # decoded from bytes, so that no line ending is changed
            yield file.read_bytes().decode("utf-8" if exact else source.encoding, errors)
    except OSError as error:
        raise _unreadable(file, error) from None
    except UnicodeError:
        raise _wrongly_encoded(file, source.encoding) from None


def _wrongly_encoded(file: Path, encoding: str) -> InputError:
    """The answer to bytes that are not of the encoding, with the place of the first."""
    decoder, offset, why = codecs.getincrementaldecoder(encoding)(), 0, ""
    with file.open("rb") as stream:
        while not why:
            piece = stream.read(2**20)
            try:
                decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:  # its object is what was left over, and the piece
                offset += len(piece) - len(error.object) + error.start
                why = f"0x{error.object[error.start]:02x}: {error.reason}"
            except UnicodeError as error:
                why = str(error)
            else:
                offset += len(piece)
            why = why or ("" if piece else "a sequence that is not whole")
    return bad(
        f"{file}, which is not {encoding} at byte {offset} ({why})",
        "text in the encoding that data.encoding names; data.tokens = 'bytes' takes any bytes",
        "--set data.encoding=cp1252 for text from Windows in western Europe, for example, or "
        "--set data.tokens=bytes",
    )


def _jsonl(file: Path, source: Source, errors: str) -> Iterator[str]:
    with file.open(encoding=source.encoding, errors=errors) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _field(line, source.field, f"{file}, line {number}")


def _field(line: str, field: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise bad(
            f"{where}, which is not JSON ({error})", "one object a line", '{"text": "..."}'
        ) from None
    values = row if isinstance(row, dict) else {}
    if not isinstance(values.get(field), str):
        raise _no_text(where, field, [key for key, value in values.items() if _is_text(value)])
    return values[field]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _no_text(where: str, field: str, others: list[str]) -> InputError:
    """The answer to a row whose `field` is missing or no text; `others` are its fields of text."""
    allowed = "data.field names a field that has text in every row"
    if others:
        allowed += f", of those with text here: {', '.join(others[:8])}"
        instead = f"data.field = '{others[0]}'"
    else:
        instead = f"{json.dumps({field: '...'}, ensure_ascii=False)}, the text in quotes"
    return bad(f"{where}, which has no text in the field '{field}'", allowed, instead)


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
            "pip install 'shardwise[parquet]'",
        ) from None
    return pyarrow.parquet


def _instead() -> str:
    return (
        "--set data.source=stdlib, or the path of your own text such as "
        '--set data.source=notes.txt (in a file: source = "notes.txt" under [data])'
    )
