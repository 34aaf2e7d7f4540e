"""The record of a run: one line a step, whole lines only, no step twice."""

from dataclasses import replace
from pathlib import Path

from shardwise.callbacks import Callbacks
from shardwise.train import metrics
from shardwise.train.metrics import Record

ONE = Record(
    step=1, consumed=8, loss=3.5, lr=1e-3, tokens=64, seconds=0.5, tokens_per_s=128.0, mfu=0.25,
    sent_bytes=1000,
)  # fmt: skip


def write(folder: Path, first: int, last: int) -> None:
    with metrics.writer(folder, first - 1) as file:
        kept = metrics.Metrics(file, Callbacks([]))
        for step in range(first, last + 1):
            kept.write(replace(ONE, step=step, consumed=8 * step))


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    """One object a step; what a step does not have is not in its line."""
    evaluated = replace(ONE, step=2, validation=3.25, memory_bytes={"parameters": 12})
    with metrics.writer(tmp_path, 0) as file:
        kept = metrics.Metrics(file, Callbacks([]))
        kept.write(ONE)
        kept.write(evaluated)
    assert metrics.read(tmp_path) == [ONE, evaluated]
    first = (tmp_path / metrics.FILE).read_text().splitlines()[0]
    assert "validation" not in first


def test_a_resumed_run_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    """Resumed after step 3 of 5, the curve has steps 1 to 7 once each."""
    write(tmp_path, 1, 5)
    write(tmp_path, 4, 7)
    assert [record.step for record in metrics.read(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_line_that_was_cut_short_is_dropped(tmp_path: Path) -> None:
    """A crash in the middle of a line costs that line only."""
    write(tmp_path, 1, 3)
    path = tmp_path / metrics.FILE
    path.write_text(path.read_text()[:-20])
    assert [record.step for record in metrics.read(tmp_path)] == [1, 2]
    write(tmp_path, 3, 4)
    assert [record.step for record in metrics.read(tmp_path)] == [1, 2, 3, 4]


def test_lines_that_are_no_records_are_kept(tmp_path: Path) -> None:
    """Of another version, damaged, not UTF-8: a resumed run removes only later steps."""
    lines = [replace(ONE, step=step).line().encode() for step in range(1, 6)]
    lines[1] = lines[1].replace(b"{", b'{"later": 1, ', 1)
    other = [b"\xff\xfe", b'{"step": "3"}', b"[" * 10**5, lines[3][:20], b""]
    text = b"\n".join([*lines[:3], *other, *lines[3:], b""])
    (tmp_path / metrics.FILE).write_bytes(text)
    assert [record.step for record in metrics.read(tmp_path)] == [1, 2, 3, 4, 5]
    metrics.keep_until(tmp_path, 5)
    assert (tmp_path / metrics.FILE).read_bytes() == text
    metrics.keep_until(tmp_path, 3)
    assert (tmp_path / metrics.FILE).read_bytes() == b"\n".join([*lines[:3], *other, b""])
