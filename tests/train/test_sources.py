"""Where text comes from, every kind of file in a fixed order; and the vocabularies."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.errors import InputError
from shardwise.train.data import hashes, sources, tokens
from shardwise.train.data.packed import tokenise


def digest(source: sources.Source, cache: Path) -> str:
    return source.digest(lambda files: hashes.hashes(files, cache))


def texts(source: str, field: str = "text") -> list[str]:
    return list(sources.find(source, field).documents())


def test_the_standard_library_is_program_text_without_tests() -> None:
    """Megabytes of Python in sorted order, nothing installed, no tests."""
    found = sources.find("stdlib", "text")
    names = [file.parts for file in found.files]
    assert names == sorted(names)
    assert not any({"site-packages", "test", "tests"} & set(parts) for parts in names)
    assert sum(file.stat().st_size for file in found.files) > 4_000_000
    assert any(file.name == "argparse.py" for file in found.files)


def test_a_folder_and_a_glob_are_read_in_sorted_order(tmp_path: Path) -> None:
    """Every known file, whatever the order in which they were made; others are left alone."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text("two")
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n\n{"text": "four"}\n')
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "notes.md").write_text("no")
    assert texts(str(tmp_path)) == ["one", "two", "three", "four"]
    assert texts(f"{tmp_path}/**/*.txt") == ["one", "two"]
    assert texts(str(tmp_path / "a.txt")) == ["one"]


def test_parquet_is_read_by_column(tmp_path: Path) -> None:
    """One document a row; a row without text is none."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    words = {"words": [["one"], [], ["two"]]}  # lists of text are no text
    pq.write_table(pa.table({**words, "n": [1, 2, 3], "body": ["one", None, "two"]}), path)
    assert texts(str(path), "body") == ["one", "two"]
    with pytest.raises(InputError, match=r"data\.field = 'body'"):
        texts(str(path), "text")
    with pytest.raises(InputError, match=r"no text in the field 'n'.*data\.field = 'body'"):
        texts(str(path), "n")
    with pytest.raises(InputError, match="no text in the field 'words'"):
        texts(str(path), "words")
    path.write_bytes(path.read_bytes()[:-9] + b"?" * 5 + b"PAR1")
    with pytest.raises(InputError, match=r"Parquet|cannot be read"):
        texts(str(path), "body")


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package to install is in the answer."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"pip install pyarrow"):
        texts(str(tmp_path / "rows.parquet"))


def test_the_digest_is_of_content_and_not_of_place(tmp_path: Path) -> None:
    """The same files elsewhere have the same digest; one changed letter does not."""
    digests = []
    for name, text in (("here", "one"), ("there", "one"), ("other", "onE")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(text)
        digests.append(digest(sources.find(str(tmp_path / name), "text"), tmp_path))
    assert digests[0] == digests[1] != digests[2]


def test_a_file_is_hashed_again_only_if_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the next start; but with the same length and time of change, and while it is young."""
    data, cache = tmp_path / "data" / "a.txt", tmp_path / "cache"
    data.parent.mkdir()
    cache.mkdir()
    data.write_text("one")
    found, read = sources.find(str(data.parent), "text"), list[str]()
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda f, k: (read.append(f.name), real(f, k))[1])
    first = digest(found, cache)
    assert digest(found, cache) == first and len(read) == 2
    monkeypatch.setattr(hashes, "SETTLED_S", 0.0)
    os.utime(data, ns=(0, 0))
    time.sleep(0.02)
    assert [digest(found, cache) for _ in range(3)] == [first] * 3 and len(read) == 3
    data.write_text("two")
    os.utime(data, ns=(0, 0))
    time.sleep(0.02)
    other = digest(found, cache)
    assert other != first and len(read) == 4
    for damage in ("", "[1]", json.dumps({str(data): [[3, 0, 0, 0], "zz"]})):
        next(cache.glob("*.hashes.json")).write_text(damage)
        assert digest(found, cache) == other


@pytest.mark.parametrize(
    ("name", "content", "phrase"),
    [
        ("absent.txt", None, "where no"),
        ("empty.txt", "", "empty.txt', without any text"),
        ("empty.txt", "", "Write instead: --set data.source=stdlib, or the path of your own"),
        ("a.csv", "x", ".jsonl"),
        ("a.jsonl", "{nonsense", "line 1, which is not JSON"),
        ("a.jsonl", json.dumps({"n": 1, "body": "x"}), "data.field = 'body'"),
        ("a.jsonl", "[]", "no text in the field 'text'"),
        ("a.jsonl", '{"text": 3}', 'Write instead: {"text": "..."}'),
        ("a.jsonl", '{"text": 3, "id": 4, "body": "x"}', "Write instead: data.field = 'body'"),
        ("a.jsonl", '{"text": null}', 'Write instead: {"text": "..."}'),
        ("a.jsonl", "[" * 100_000, "line 1, which is not JSON"),
        ("a" * 300 + ".txt", None, "cannot be read (File name too long)"),
    ],
)
def test_bad_data_is_refused(tmp_path: Path, name: str, content: str | None, phrase: str) -> None:
    """Missing, empty, of another kind, not JSON, without the field: each has its answer."""
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as error:
        texts(str(tmp_path / name))
    assert phrase in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        *("empty", "other", "other/*.csv", "other/*.txt", "absent", "pipe"),
        "~nobody-of-that-name/a.txt",
    ],
)
def test_a_path_without_text_is_refused(tmp_path: Path, source: str) -> None:
    """An empty folder, other files, a pattern that matches nothing, a pipe."""
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.csv").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError) as error:
        texts(source if source.startswith("~") else str(tmp_path / source))
    assert "where no .txt, .jsonl, .parquet file is" in str(error.value)


def test_a_file_that_is_gone_when_it_is_read_is_named(tmp_path: Path) -> None:
    """Between the look at the folder and the reading: an answer, by the hash and by the text."""
    (tmp_path / "a.txt").write_text("one")
    found = sources.find(str(tmp_path), "text")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(InputError, match=r"a\.txt, which cannot be read \(No such file"):
        digest(found, tmp_path)
    with pytest.raises(InputError, match=r"a\.txt, which cannot be read \(No such file"):
        list(found.documents())


LATIN = "déjà vu, naïve café\r\n".encode("latin-1") + bytes(range(128, 256))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_bytes_are_bytes_under_the_byte_vocabulary(tmp_path: Path, name: str) -> None:
    """A file that is not UTF-8 is one token a byte, with the values that the file has."""
    data = LATIN.replace(b"\r\n", b"") if name == "a.jsonl" else LATIN
    line = b'{"text": "' + data + b'"}\n'
    (tmp_path / name).write_bytes(line if name == "a.jsonl" else data)
    packed = tokenise(sources.find(str(tmp_path / name), "text"), "bytes", tmp_path / "cache")
    assert packed.stream.tolist() == [*data, 256]
    assert packed.text_bytes == len(data)


@pytest.mark.parametrize(
    ("name", "data", "encoding", "place"),
    [
        ("a.txt", b"caf\xe9 au lait", "utf-8", "byte 0xe9 in position 3"),
        ("a.txt", b"whole \xc3", "utf-8", "byte 0xc3 in position 6"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n', "utf-8", "byte 0xff in position 25"),
        ("a.txt", b"a\x81b", "cp1252", "byte 0x81 in position 1"),
    ],
)
def test_text_of_another_encoding_is_refused_with_its_place(
    tmp_path: Path, name: str, data: bytes, encoding: str, place: str
) -> None:
    """A tokenizer needs text: the file and the byte are named, and the key that would help."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError) as error:
        tokenise(sources.find(str(tmp_path / name), "text", encoding), "bpe:260", tmp_path / "c")
    assert f"{name}, which is not {encoding} (" in str(error.value)
    assert place in str(error.value)
    assert "--set data.encoding=" in str(error.value)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "shift_jis"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_the_encoding_that_is_named_is_read(tmp_path: Path, name: str, encoding: str) -> None:
    """Documents are the text that was written in that encoding, line endings included."""
    text = "one two" if encoding == "shift_jis" else "déjà vu"
    text += " 日本" * (encoding == "shift_jis")
    written = json.dumps({"text": text}, ensure_ascii=False) + "\n" if name == "a.jsonl" else text
    (tmp_path / name).write_bytes(written.encode(encoding))
    assert list(sources.find(str(tmp_path / name), "text", encoding).documents()) == [text]


@pytest.mark.parametrize("encoding", ["utf8000", "rot13", "a\x00b"])
def test_an_encoding_that_is_none_is_refused(encoding: str) -> None:
    """Before any file is read, with the names of common ones."""
    with pytest.raises(InputError, match=r"data\.encoding = .*latin-1"):
        sources.find("stdlib", "text", encoding)


def test_the_digest_knows_the_encoding(tmp_path: Path) -> None:
    """The same bytes in another encoding are other text, tokenised again."""
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    found = {
        digest(sources.find(str(tmp_path), "text", e), tmp_path) for e in ("latin-1", "cp1250")
    }
    assert len(found) == 2


TEXTS = [
    "def f(x):\n    return x + 1\n",
    "class A:\n    x = 'é €'\n",
    "import os, sys\n",
    "abcdefgh",
] * 20


@settings(deadline=None, max_examples=40)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_come_back(text: str) -> None:
    """Byte tokens lose nothing, whatever the text."""
    vocabulary = tokens.ByteVocabulary()
    numbers = vocabulary.encode(text)
    assert vocabulary.decode(numbers.tolist()) == text
    assert len(numbers) == len(text.encode())


def test_the_byte_separator_is_no_byte() -> None:
    """257 tokens: no text can contain the separator."""
    vocabulary = tokens.ByteVocabulary()
    assert (vocabulary.size, vocabulary.separator) == (257, 256)


@settings(deadline=None, max_examples=40)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_trained_bpe_spells_any_text(text: str) -> None:
    """A BPE trained on little text still holds all bytes, so no text is unknown to it."""
    assert TRAINED.decode(TRAINED.encode(text).tolist()) == text


TRAINED = tokens.train_bpe(TEXTS, 300)


def test_a_trained_bpe_has_the_size_asked_for_and_shortens() -> None:
    """Training reaches the size given, and a word of the data is fewer tokens than bytes."""
    assert TRAINED.size == 300
    assert len(TRAINED.encode("return")) < len("return")


def test_a_saved_tokenizer_loads_to_the_same_vocabulary(tmp_path: Path) -> None:
    """The name holds a hash of the content, so equal names are equal vocabularies."""
    TRAINED.save(tmp_path / "tokenizer.json")
    loaded = tokens.load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.name, loaded.size) == (TRAINED.name, TRAINED.size)
    assert loaded.separator == TRAINED.separator


@pytest.mark.parametrize(
    "text", ["bpe:", "bpe:256", "bpe:many", "bpe:-3", "bpe:1048577", "bpe:" + "9" * 5000]
)
def test_a_bpe_that_cannot_hold_the_bytes_is_refused(text: str) -> None:
    """256 bytes and a separator are the least."""
    with pytest.raises(InputError, match="a whole number above 256"):
        tokens.bpe_size(text)


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    """A missing file and a file of something else are named."""
    for name in ("tokenizer.json", "a" * 300):
        with pytest.raises(InputError, match="which does not exist"):
            tokens.load_tokenizer(tmp_path / name)
    with pytest.raises(InputError, match=r"which is a folder.*Write instead: tokens = 'bytes'"):
        tokens.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[1, 2]")
    with pytest.raises(InputError, match=r"not a tokenizer\.json"):
        tokens.load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match=r"is a folder.*Write instead: .*/tokenizer\.json'"):
        tokens.load_tokenizer(tmp_path)


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path: Path) -> None:
    """Documents could not be kept apart."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "t.json"))  # noqa: S106
    with pytest.raises(InputError, match="ends a document"):
        tokens.load_tokenizer(tmp_path / "t.json")


@pytest.mark.parametrize("eos", ["</end>", {"content": "</end>"}])
def test_the_end_of_a_document_is_the_one_of_the_tokenizers_folder(
    eos: Any, tmp_path: Path
) -> None:
    """`eos_token` of tokenizer_config.json, also beside a token that would be guessed."""
    from tokenizers import Tokenizer, models

    words = {"a": 0, "</s>": 1, "</end>": 2}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(tmp_path / "tokenizer.json"))  # noqa: S106
    guessed = tokens.load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    found = tokens.load_tokenizer(tmp_path / "tokenizer.json")
    assert (guessed.separator, found.separator) == (1, 2)
    assert guessed.name != found.name


def test_a_vocabulary_that_does_not_fit_is_refused() -> None:
    """256 rows cannot hold 257 tokens; 257 can.  Those of a folder cannot be changed."""
    tokens.check_fits(tokens.ByteVocabulary(), 257, "gpt:quickstart")
    with pytest.raises(InputError, match=r"model\.vocabulary = 257"):
        tokens.check_fits(tokens.ByteVocabulary(), 256, "gpt:quickstart")
    with pytest.raises(InputError, match=r"instead: data\.tokens = 'PATH/tokenizer\.json'"):
        tokens.check_fits(tokens.ByteVocabulary(), 256, "hf:./folder")
