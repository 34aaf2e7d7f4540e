"""From text to batches: sources, tokenizers, the cache of tokens, and the order of sequences."""

import errno
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from shardwise.core.errors import InputError
from shardwise.train.data import data, packed, sources, tokens
from tests.engine.cases import fails

quick = settings(deadline=None, max_examples=40)  # no test asserts a time
BYTES = tokens.ByteVocabulary()


def corpus_of(
    count: int, sequence: int, validation: float = 0.1, *ends: int, apart: bool = False
) -> data.Corpus:
    """A corpus over the stream 0, 1, 2, ..., count - 1, of sources with these ends."""
    stream = np.arange(count, dtype=np.uint16)
    found = packed.Packed("key", stream, count, 1, BYTES, (*ends, count))
    return data.split(found, sequence, validation, apart=apart)


def source_in(folder: Path, *texts: str) -> sources.Source:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    return sources.find(str(folder), "text")


def texts_of(source: object, field: str = "text") -> list[str]:
    return list(sources.find(str(source), field).documents())


# --- sequences ----------------------------------------------------------------------------------


@quick
@given(
    count=st.integers(30, 120),
    sequence=st.integers(1, 9),
    batch=st.integers(1, 17),
    ranks=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_an_epoch_takes_every_sequence_once_on_any_number_of_ranks(
    count: int, sequence: int, batch: int, ranks: int, seed: int
):
    """The ranks' even blocks end to end are the batch; epochs and seeds have other orders."""
    corpus = corpus_of(count, sequence)
    batches, epochs = data.Batches(corpus, batch, seed), list[int]()
    while len(epochs) < 2 * len(corpus.training):
        alone = batches.numbers(len(epochs))
        blocks = [data.block(alone, rank, ranks) for rank in range(ranks)]
        assert np.concatenate(blocks).tolist() == alone.tolist()
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
        epochs += alone.tolist()
    each = len(corpus.training)
    assert sorted(epochs[:each]) == sorted(epochs[each:]) == corpus.training.tolist()
    other = data.Batches(corpus, batch, seed + 1).numbers(0).tolist()
    assert each < 20 or len({(*epochs[:batch],), (*epochs[each:][:batch],), (*other,)}) > 1


@quick
@given(count=st.integers(5, 300), sequence=st.integers(1, 9), share=st.floats(0.01, 0.99))
def test_the_parts_are_disjoint_and_hold_every_token(count: int, sequence: int, share: float):
    """Training and validation share no sequence; every token but the first is a target once."""
    if (count - 1) / sequence <= 1:
        return
    corpus = corpus_of(count, sequence, share)
    both = np.concatenate([corpus.training, corpus.validation])
    assert len(set(both.tolist())) == len(both)
    assert len(corpus.training) and len(corpus.validation)
    rows = corpus.rows(np.sort(both))
    asked = rows.targets != data.IGNORED
    assert rows.targets[asked].tolist() == list(range(1, count))
    assert (rows.inputs[asked] + 1 == rows.targets[asked]).all()
    more = data.padded(rows, len(both) + 2)
    counted = int((more.targets != data.IGNORED).sum())
    assert (len(more.inputs), counted) == (len(both) + 2, asked.sum())
    assert data.padded(rows, 1) is rows


def test_validation_is_spread_over_the_stream():
    """A twentieth of the sequences, from the beginning, the middle and the end alike."""
    corpus = corpus_of(10_001, 2, 0.05)
    assert len(corpus.validation) / 5000 == pytest.approx(0.05, abs=0.01)
    assert np.histogram(corpus.validation, bins=4, range=(0, 5000))[0].min() > 0


def test_weights_hold_in_each_round_and_each_source_has_its_own_epochs():
    """Three of `a` for one of `b`; a step has the same batch whatever was asked before."""
    corpus = corpus_of(1500, 5, 0.1, 1000, 1250, apart=True)
    ends = [corpus.packed.stream[numbers[-1] * 5] for numbers in corpus.by_source[:2]]
    assert (ends, min(corpus.validation) * 5) == ([995, 1240], 1250)
    order = data.Batches(corpus, 8, 3, (3.0, 1.0))
    taken = np.concatenate([order.numbers(consumed) for consumed in range(0, 1000, 8)])
    for mine, share in zip(corpus.by_source, (750, 250), strict=False):
        found = taken[np.isin(taken, mine)]
        assert len(found) == share
        for start in range(0, share - len(mine) + 1, len(mine)):
            assert sorted(found[start : start + len(mine)]) == mine.tolist()
    assert order.numbers(504).tolist() == taken[504:512].tolist()
    other = data.Batches(corpus, 8, 4, (3.0, 1.0))
    assert other.numbers(0).tolist() != taken[:8].tolist()


def test_the_unigram_entropy_of_two_even_tokens_is_one_bit():
    """Nats: the logarithm of 2, for a stream that alternates."""
    stream = np.tile(np.array([65, 66], np.uint16), 500)
    corpus = data.split(packed.Packed("key", stream, 1000, 1, BYTES), 10, 0.5)
    assert data.unigram_entropy(corpus) == pytest.approx(np.log(2), rel=1e-3)


# --- the cache of tokens ------------------------------------------------------------------------


def test_the_second_reading_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tokenised once for the same content, again for other content, also when trained."""
    source = source_in(tmp_path / "in", "some text " * 50)
    for spoken in ("bytes", "bpe:280"):
        first = packed.tokenise([source], spoken, tmp_path / "cache")
        with monkeypatch.context() as patch:
            patch.setattr(sources.Source, "documents", fails(errno.EIO))
            again = packed.tokenise([source], spoken, tmp_path / "cache")
        assert again.key == first.key
        assert again.stream.tolist() == first.stream.tolist()
    for text, same in (("other", False), ("some text " * 50, True)):  # wherever the files lie
        again = packed.tokenise([source_in(tmp_path / "b", text)], spoken, tmp_path / "cache")
        assert (again.key == first.key) is same


def test_several_sources_are_one_stream_with_the_ends_of_each(tmp_path: Path):
    """A BPE is trained on those of training, not on that of the validation."""
    found = [source_in(tmp_path / name, name * 50) for name in ("ab", "cd", "xyxy")]
    both = packed.tokenise(found, "bytes", tmp_path / "cache")
    assert (
        both.ends == [101, 202, 403] and bytes(both.stream[101:201].astype(np.uint8)) == b"cd" * 50
    )
    trained = packed.tokenise(found, "bpe:260", tmp_path / "cache", trained=2)
    assert trained.ends[1] < 101 < trained.ends[2] - trained.ends[1]


def test_of_several_that_ask_at_once_one_does_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Four ranks of a machine start together: the text is tokenised once, and all four have it."""
    source = source_in(tmp_path / "in", "some text " * 50)
    write, calls = packed._write, []
    monkeypatch.setattr(packed, "_write", lambda *args: (calls.append(args), write(*args)))
    with ThreadPoolExecutor(4) as ranks:
        asked = [ranks.submit(packed.tokenise, [source], "bytes", tmp_path / "c") for _ in range(4)]
        streams = [job.result().stream.tolist() for job in asked]
    assert len(calls) == 1
    assert streams == [streams[0]] * 4


def test_a_broken_off_writing_leaves_nothing_that_is_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """When the reading fails half way, the next try is right, and removes what a kill has left."""
    source, cache = source_in(tmp_path / "in", "ab", "c"), tmp_path / "cache"

    def half(_: sources.Source, exact: bool) -> Any:
        yield "ab"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sources.Source, "documents", half)
        with pytest.raises(KeyboardInterrupt):
            packed.tokenise([source], "bytes", cache)
    assert {"".join(file.suffixes[-2:]) for file in cache.glob("*")} <= {".lock"}
    kept = packed.tokenise([source], "bytes", cache)
    assert kept.stream.tolist() == [97, 98, 256, 99, 256]  # a separator ends each document
    assert (kept.text_bytes, kept.documents, kept.stream.dtype) == (3, 2, np.uint16)
    (whole,) = cache.glob("*.json")
    left = cache / f".{whole.stem}.tokens.123"
    left.write_text("half")
    whole.unlink()
    packed.tokenise([source], "bytes", cache)
    assert not left.exists()


def test_a_cache_that_cannot_be_written_serves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Shared and read-only: no lock and no hash can be written; only other text is refused."""
    source = source_in(tmp_path / "in", "some text " * 50)
    first = packed.tokenise([source], "bpe:280", tmp_path / "cache")
    read_only = fails(errno.EROFS)
    monkeypatch.setattr(packed.tempfile, "TemporaryFile", read_only)
    monkeypatch.setattr("shardwise.checkpoint.lock._acquire", read_only)
    monkeypatch.setattr(packed, "write_file", read_only)
    again = packed.tokenise([source], "bpe:280", tmp_path / "cache")
    assert (again.key, again.stream.tolist()) == (first.key, first.stream.tolist())
    for other in ("bytes", "bpe:290"):
        with pytest.raises(InputError, match=r"data\.cache = .*Read-only file system"):
            packed.tokenise([source], other, tmp_path / "cache")


def test_tokenising_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Without a terminal too."""
    monkeypatch.setattr("shardwise.core.tools.signs_of_life.EVERY_S", 0.01)
    source, documents = source_in(tmp_path / "in", "ab"), sources.Source.documents
    slow = lambda *args, **more: (time.sleep(0.1), documents(*args, **more))[1]  # noqa: E731
    monkeypatch.setattr(sources.Source, "documents", slow)
    packed.tokenise([source], "bytes", tmp_path / "cache")
    assert f"tokenising {tmp_path}/in, 0 MiB: 0 s" in capsys.readouterr().err


# --- sources ------------------------------------------------------------------------------------


def test_the_standard_library_is_program_text_without_tests():
    """Megabytes of Python in sorted order, nothing installed, no tests."""
    found = sources.find("stdlib", "text")
    names = [file.parts for file in found.files]
    assert names == sorted(names)
    assert not any({"site-packages", "test", "tests"} & set(parts) for parts in names)
    assert sum(file.stat().st_size for file in found.files) > 4_000_000
    assert any(file.name == "argparse.py" for file in found.files)


def test_a_folder_and_a_glob_are_read_in_sorted_order(tmp_path: Path):
    """Every known file, whatever the order in which they were made; others are left alone."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text("two")
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n\n{"text": "four"}\n')
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "notes.md").write_text("no")
    assert texts_of(tmp_path) == ["one", "two", "three", "four"]
    assert texts_of(f"{tmp_path}/**/*.txt") == ["one", "two"]
    assert texts_of(tmp_path / "a.txt") == ["one"]


def test_parquet_is_read_by_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One document a row; a row without text is none.  Without datasets: what to install."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    words = {"words": [["one"], [], ["two"]]}  # lists of text are no text
    pq.write_table(pa.table({**words, "n": [1, 2, 3], "body": ["one", None, "two"]}), path)
    assert texts_of(path, "body") == ["one", "two"]
    for field in ("n", "words"):
        with pytest.raises(InputError, match=f"no text in the field '{field}'.*= 'body'"):
            texts_of(path, field)
    path.write_bytes(path.read_bytes()[:-9] + b"?" * 5 + b"PAR1")
    with pytest.raises(InputError, match=r"datasets cannot read"):
        texts_of(path, "body")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install datasets"):
        texts_of(path)


def test_a_data_set_has_splits_as_on_the_hub(tmp_path: Path):
    """A folder with files for each split; other columns are not read; a split that is missing."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        rows = pa.table({"id": [1, 2], "text": [f"{split} one", f"{split} two"]})
        pq.write_table(rows, tmp_path / f"data/{split}-00000-of-00001.parquet")
    assert texts_of(f"hf:{tmp_path}") == ["train one", "train two"]
    assert texts_of(f"hf:{tmp_path}:validation") == ["validation one", "validation two"]
    with pytest.raises(InputError, match=r"splits \(train, validation\).*/test_a.*:train"):
        texts_of(f"hf:{tmp_path}:test")


def test_of_a_large_source_a_part_is_enough_for_a_check(tmp_path: Path):
    """Of a file, of rows, and of several files; it is not hashed as a whole."""
    part = replace(source_in(tmp_path / "in", "ab\u00e9" * 9, "c" * 9), most_bytes=12)
    assert part.cut and not replace(part, most_bytes=50).cut
    assert [*part.documents()] == ["ab\u00e9" * 3, "c" * 9]
    (tmp_path / "rows.jsonl").write_text('{"text": "abcde"}\n' * 9)
    found = replace(sources.find(str(tmp_path / "rows.jsonl"), "text"), most_bytes=12)
    assert [*found.documents()] == ["abcde"] * 3


def test_bytes_are_bytes_under_the_byte_vocabulary(tmp_path: Path):
    """A file that is not UTF-8 is one token a byte, with the values that the file has."""
    content = "déjà vu, naïve café".encode("latin-1") + b"\r\n" + bytes(range(128, 256))
    (tmp_path / "a.txt").write_bytes(content)
    found = packed.tokenise([sources.find(str(tmp_path), "text")], "bytes", tmp_path / "cache")
    assert found.stream.tolist() == [*content, 256]
    assert found.text_bytes == len(content)


@pytest.mark.parametrize(
    ("name", "content", "phrase"),
    [
        ("absent.txt", None, "where no .txt, .jsonl, .parquet, .arrow file is"),
        ("a.csv", b"x", "Write instead: the same text in a .txt file."),
        ("a" * 300 + ".txt", None, "cannot be read (File name too long)"),
        ("empty.txt", b"", "Write instead: --set data.source=stdlib, or the path of your own"),
        ("a.jsonl", b'{"text": ""}\n', "all empty"),
        ("a.jsonl", b"{nonsense", "a.jsonl, which datasets cannot read (ArrowInvalid: JSON parse"),
        ("a.jsonl", b'{"n": 3}', 'Write instead: {"text": "..."}'),
        ("a.jsonl", b'{"text": 3, "id": 4, "body": "x"}', "Write instead: data.field = 'body'"),
        (
            "a.txt",
            b"caf\xe9 au lait",
            "a.txt, which is not UTF-8 ('utf-8' codec can't decode byte 0xe9",
        ),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n', "a.jsonl, which datasets cannot read"),
    ],
)
def test_bad_data_is_refused(tmp_path: Path, name: str, content: Any, phrase: str):
    """Missing, empty, of another kind or encoding, without the field: each has its answer."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "absent.txt")
    with pytest.raises(InputError) as error:
        packed.tokenise([sources.find(str(tmp_path / name), "text")], "bpe:260", tmp_path / "cache")
    assert phrase in str(error.value)


def test_a_file_that_is_gone_when_it_is_read_is_named(tmp_path: Path):
    """Between the look at the folder and the reading: an answer, by the hash and by the text."""
    found = source_in(tmp_path / "in", "one")
    (tmp_path / "in" / "0.txt").unlink()
    for read in (lambda: found.state, lambda: list(found.documents())):
        with pytest.raises(InputError, match=r"0\.txt, which cannot be read \(No such file"):
            read()


# --- vocabularies -------------------------------------------------------------------------------

CODE = ["def f(x):\n    return x + 1\n", "class A:\n    x = 'é €'\n", "import os, sys\n"] * 20
TRAINED = tokens.train_bpe(CODE, 290)


@quick
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_comes_back(text: str):
    """Byte tokens and a BPE trained on little text lose nothing; the separator is no byte."""
    numbers = BYTES.encode([text])[0].tolist()
    assert bytes(numbers) == text.encode()
    assert TRAINED._tokenizer.decode(TRAINED.encode([text])[0].tolist()) == text
    assert (BYTES.size, BYTES.separator) == (257, 256)


def test_a_trained_bpe_shortens_and_loads_to_the_same_vocabulary(tmp_path: Path):
    """It has the size asked for; its name holds a hash of the content."""
    assert TRAINED.size == 290
    assert len(TRAINED.encode(["return"])[0]) < len("return")
    TRAINED.save(tmp_path / "tokenizer.json")
    loaded = tokens.load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.name, loaded.size) == (TRAINED.name, TRAINED.size)
    assert loaded.separator == TRAINED.separator


@pytest.mark.parametrize("eos", ["</end>", {"content": "</end>"}])
def test_the_end_of_a_document_is_the_one_of_the_tokenizers_folder(eos: Any, tmp_path: Path):
    """`eos_token` of tokenizer_config.json, also beside a token that would be guessed."""
    words = {"a": 0, "</s>": 1, "</end>": 2}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(tmp_path / "tokenizer.json"))  # noqa: S106
    guessed = tokens.load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    found = tokens.load_tokenizer(tmp_path / "tokenizer.json")
    assert (guessed.separator, found.separator) == (1, 2)
    assert guessed.name != found.name


@pytest.mark.parametrize(
    ("call", "phrase"),
    [
        (lambda _: corpus_of(5, 10), "at least two sequences"),
        *(
            (lambda _, size=size: tokens.bpe_size(f"bpe:{size}"), "a whole number above 256")
            for size in ("", "256", "many", "1048577", "9" * 5000)
        ),
        (lambda at: tokens.load_tokenizer(at / "absent.json"), "read as a tokenizer.*No such file"),
        (tokens.load_tokenizer, r"cannot be read as a tokenizer\.json"),
        (lambda at: tokens.load_tokenizer(at / "tokenizer.json"), r"read as a tokenizer\.json"),
        (lambda at: tokens.load_tokenizer(at / "no_end.json"), "ends a document"),
        (lambda _: tokens.check_fits(BYTES, 256, "gpt:small"), r"model\.vocabulary = 257"),
        (lambda _: tokens.check_fits(BYTES, 256, "hf:./w"), r"= 'PATH/tokenizer\.json'"),
        (lambda at: packed.tokenise([], "bytes", at / "taken" / "in"), "nothing can be wri"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[Path], object], phrase: str, tmp_path: Path):
    """Sizes, encodings, tokenizers and folders."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "tokenizer.json").write_text("[1, 2]")
    (tmp_path / "in" / "taken").touch()
    words = models.WordLevel({"a": 0, "b": 1}, unk_token="a")  # noqa: S106
    Tokenizer(words).save(str(tmp_path / "in" / "no_end.json"))
    with pytest.raises(InputError, match=phrase):
        call(tmp_path / "in")
    tokens.check_fits(BYTES, 257, "gpt:quickstart")
