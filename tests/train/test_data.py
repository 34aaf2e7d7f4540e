"""The batches: nothing lost, shuffled, resumable, and the same for any number of ranks."""

import errno
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.errors import InputError
from shardwise.train.data import data, packed, sources, tokens

quick = settings(deadline=None, max_examples=40)  # no test asserts a time


def corpus_of(count: int, sequence: int, validation: float = 0.1) -> data.Corpus:
    """A corpus over the stream 0, 1, 2, ..., count - 1."""
    stream = np.arange(count, dtype=np.uint16)
    kept = packed.Packed("key", stream, count, 1, tokens.ByteVocabulary())
    return data.split(kept, sequence, validation)


@quick
@given(count=st.integers(1, 600), seed=st.integers(0, 2**40), epoch=st.integers(0, 9))
def test_the_shuffle_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    """Every number appears once, whatever the count, and any part can be asked for alone."""
    whole = data.shuffle(np.arange(count), count, seed, epoch)
    assert sorted(whole.tolist()) == list(range(count))
    assert data.shuffle(np.array([count // 2]), count, seed, epoch)[0] == whole[count // 2]


def test_the_shuffle_changes_with_seed_and_epoch_and_leaves_little_in_place() -> None:
    """Two epochs and two seeds are three orders; none keeps neighbours together."""
    orders = [data.shuffle(np.arange(1000), 1000, seed, epoch) for seed, epoch in
              ((0, 0), (0, 1), (1, 0))]  # fmt: skip
    for order in orders:
        assert (np.abs(np.diff(order)) == 1).sum() < 15
        assert abs(np.corrcoef(np.arange(1000), order)[0, 1]) < 0.15
    assert len({tuple(order) for order in orders}) == 3


@quick
@given(
    count=st.integers(30, 120),
    sequence=st.integers(1, 9),
    batch=st.integers(1, 17),
    ranks=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_batches_are_the_same_for_any_number_of_ranks(
    count: int, sequence: int, batch: int, ranks: int, seed: int
) -> None:
    """Step by step for two epochs, the ranks' blocks end to end are the one-rank batch."""
    corpus = corpus_of(count, sequence)
    batches = data.Batches(corpus, batch, seed)
    consumed = 0
    while consumed < 2 * len(corpus.training):
        alone = batches.numbers(consumed)
        blocks = [data.block(alone, rank, ranks) for rank in range(ranks)]
        assert np.concatenate(blocks).tolist() == alone.tolist()
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
        consumed += len(alone)


@quick
@given(count=st.integers(30, 120), sequence=st.integers(1, 9), batch=st.integers(1, 17))
def test_an_epoch_takes_every_sequence_once(count: int, sequence: int, batch: int) -> None:
    """The last batch of an epoch is smaller, not dropped, and the next epoch has another order."""
    corpus = corpus_of(count, sequence)
    batches = data.Batches(corpus, batch, seed=3)
    epoch: list[int] = []
    while len(epoch) < len(corpus.training):
        epoch += batches.numbers(len(epoch)).tolist()
    assert sorted(epoch) == corpus.training.tolist()


def test_eight_over_three_is_three_three_two() -> None:
    """Uneven shares differ by one, and a rank may have none."""
    assert [len(data.block(np.arange(8), rank, 3)) for rank in range(3)] == [3, 3, 2]
    assert [len(data.block(np.arange(1), rank, 3)) for rank in range(3)] == [1, 0, 0]


@quick
@given(count=st.integers(5, 300), sequence=st.integers(1, 9), share=st.floats(0.01, 0.99))
def test_the_parts_are_disjoint_and_hold_every_token(
    count: int, sequence: int, share: float
) -> None:
    """Training and validation share no sequence; every token but the first is a target once."""
    if (count - 1) / sequence <= 1:
        return
    corpus = corpus_of(count, sequence, share)
    both = np.concatenate([corpus.training, corpus.validation])
    assert len(set(both.tolist())) == len(both)
    assert len(corpus.training) and len(corpus.validation)
    rows = corpus.rows(np.sort(both))
    assert rows.targets[rows.targets != data.IGNORED].tolist() == list(range(1, count))
    asked = rows.targets != data.IGNORED
    assert (rows.inputs[asked] + 1 == rows.targets[asked]).all()


def test_validation_is_spread_over_the_stream() -> None:
    """A twentieth of the sequences, from the beginning, the middle and the end alike."""
    corpus = corpus_of(10_001, 2, 0.05)
    assert len(corpus.validation) / 5000 == pytest.approx(0.05, abs=0.01)
    quarters = np.histogram(corpus.validation, bins=4, range=(0, 5000))[0]
    assert quarters.min() > 0


def test_padding_asks_for_nothing() -> None:
    """Padded rows have no target, and the token count does not change."""
    rows = corpus_of(100, 5).rows(np.array([0, 1]))
    more = data.padded(rows, 4)
    assert more.inputs.shape == more.targets.shape == (4, 5)
    assert more.tokens == rows.tokens == 10
    assert data.padded(rows, 1) is rows


def test_too_little_data_is_refused() -> None:
    """One sequence cannot be both trained on and held out."""
    with pytest.raises(InputError, match="at least two sequences"):
        corpus_of(5, 10)


def test_the_unigram_entropy_of_two_even_tokens_is_one_bit() -> None:
    """Nats: the logarithm of 2, for a stream that alternates."""
    stream = np.tile(np.array([65, 66], np.uint16), 500)
    kept = packed.Packed("key", stream, 1000, 1, tokens.ByteVocabulary())
    corpus = data.split(kept, 10, 0.5)
    assert data.unigram_entropy(corpus) == pytest.approx(np.log(2), rel=1e-3)


def source_in(folder: Path, *texts: str) -> sources.Source:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    return sources.find(str(folder), "text")


def test_documents_are_ended_by_the_separator(tmp_path: Path) -> None:
    """The stream is the documents in order, each followed by one separator."""
    kept = packed.tokenise(source_in(tmp_path / "in", "ab", "c"), "bytes", tmp_path / "cache")
    assert kept.stream.tolist() == [97, 98, 256, 99, 256]
    assert (kept.text_bytes, kept.documents) == (3, 2)
    assert kept.stream.dtype == np.uint16
    assert isinstance(kept.stream, np.memmap)


def test_the_second_reading_comes_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenised once for the same content, again for other content, also when trained."""
    source = source_in(tmp_path / "in", "some text " * 50)
    for spoken in ("bytes", "bpe:280"):
        first = packed.tokenise(source, spoken, tmp_path / "cache")
        with monkeypatch.context() as patch:
            patch.setattr(sources.Source, "documents", _never)
            again = packed.tokenise(source, spoken, tmp_path / "cache")
        assert again.key == first.key
        assert again.stream.tolist() == first.stream.tolist()
    other = packed.tokenise(source_in(tmp_path / "b", "other"), "bytes", tmp_path / "cache")
    assert other.key != first.key


def _never(_: Any) -> Any:
    raise AssertionError("read again")


def test_of_several_that_ask_at_once_one_does_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks of a machine start together: the text is tokenised once, and all four have it."""
    source = source_in(tmp_path / "in", "some text " * 50)
    write, calls = packed._write, []

    def counted(*args: Any) -> None:
        calls.append(args)
        write(*args)

    monkeypatch.setattr(packed, "_write", counted)
    with ThreadPoolExecutor(4) as ranks:
        asked = [ranks.submit(packed.tokenise, source, "bytes", tmp_path / "c") for _ in range(4)]
        streams = [job.result().stream.tolist() for job in asked]
    assert len(calls) == 1
    assert streams == [streams[0]] * 4


def test_a_broken_off_writing_leaves_nothing_that_is_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the reading fails half way, the next try starts over and is right."""
    source = source_in(tmp_path / "in", "ab", "c")

    def half(_: sources.Source, exact: bool) -> Any:
        yield "ab"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sources.Source, "documents", half)
        with pytest.raises(KeyboardInterrupt):
            packed.tokenise(source, "bytes", tmp_path / "cache")
    assert not [
        file
        for file in (tmp_path / "cache").iterdir()
        if not file.name.endswith((".lock", ".hashes.json"))
    ]
    kept = packed.tokenise(source, "bytes", tmp_path / "cache")
    assert kept.stream.tolist() == [97, 98, 256, 99, 256]


def test_documents_without_text_are_refused(tmp_path: Path) -> None:
    """A file whose every row is empty is empty data."""
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(InputError, match="all empty"):
        packed.tokenise(sources.find(str(tmp_path), "text"), "bytes", tmp_path / "cache")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A file where the folder should be is answered with the key to change."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match=r"data\.cache = .*nothing can be written"):
        packed.make_folder(tmp_path / "taken" / "inside", "data.cache")
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


def test_a_cache_that_cannot_be_written_serves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared and read-only: no lock and no hash can be written; only other text is refused."""
    source = source_in(tmp_path / "in", "some text " * 50)
    first = packed.tokenise(source, "bpe:280", tmp_path / "cache")
    (tmp_path / "in" / "0.txt").touch()  # its hash is taken again

    def read_only(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(packed.tempfile, "TemporaryFile", read_only)
    monkeypatch.setattr("shardwise.checkpoint.lock._acquire", read_only)
    for name in ("packed", "hashes"):
        monkeypatch.setattr(f"shardwise.train.data.{name}.publish", read_only)
    again = packed.tokenise(source, "bpe:280", tmp_path / "cache")
    assert (again.key, again.stream.tolist()) == (first.key, first.stream.tolist())
    for other in ("bytes", "bpe:290"):
        with pytest.raises(InputError, match=r"data\.cache = .*Read-only file system"):
            packed.tokenise(source, other, tmp_path / "cache")


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Up to the whole corpus, beside the tokens that the next one writes."""
    source = source_in(tmp_path / "in", "ab")
    kept = packed.tokenise(source, "bytes", tmp_path / "cache")
    left = tmp_path / "cache" / f".{kept.key}.tokens.123"
    left.write_text("half")
    (tmp_path / "cache" / f"{kept.key}.json").unlink()
    packed.tokenise(source, "bytes", tmp_path / "cache")
    assert not left.exists()


def test_tokenising_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal too."""
    monkeypatch.setattr("shardwise.core.tools.signs_of_life.EVERY_S", 0.01)
    source, read = source_in(tmp_path / "in", "ab"), sources.Source.documents

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(0.1)
        return read(*args, **more)

    monkeypatch.setattr(sources.Source, "documents", slow)
    packed.tokenise(source, "bytes", tmp_path / "cache")
    assert f"tokenising {tmp_path}/in, 0 MiB: 0 s" in capsys.readouterr().err


def test_of_a_large_source_a_part_is_enough_for_a_check(tmp_path: Path) -> None:
    """Of a file, of rows, and of several files; it is not hashed as a whole."""
    part = replace(source_in(tmp_path / "in", "ab\u00e9" * 9, "c" * 9), most_bytes=12)
    assert part.cut and not replace(part, most_bytes=50).cut
    assert [*part.documents()] == ["ab\u00e9" * 3, "c" * 9]
    assert part.digest(_never) == part.digest(_never)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "abcde"}\n' * 9)
    found = replace(sources.find(str(rows), "text"), most_bytes=12)
    assert [*found.documents()] == ["abcde"] * 3
