"""The record of a run, and what it shows: lines, a picture on a terminal, nothing of others."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shardwise.callbacks import Callbacks
from shardwise.core.plan.plan import Plan
from shardwise.train.measure import metrics, progress
from shardwise.train.measure.metrics import Record

ONE = Record(
    step=1, consumed=8, loss=3.5, lr=1e-3, tokens=64, seconds=0.5, tokens_per_s=128.0, mfu=0.25,
    sent_bytes=1000,
)  # fmt: skip


def write(folder: Path, first: int, last: int) -> None:
    with metrics.writer(folder, first - 1) as file:
        kept = metrics.MetricsWriter(file, Callbacks([]))
        for step in range(first, last + 1):
            kept.write(replace(ONE, step=step, consumed=8 * step))


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    """One object a step; what a step does not have is not in its line."""
    evaluated = replace(ONE, step=2, validation=3.25, memory_bytes={"parameters": 12})
    with metrics.writer(tmp_path, 0) as file:
        kept = metrics.MetricsWriter(file, Callbacks([]))
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


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=100, highlight=False), file


def test_a_log_gets_plain_lines() -> None:
    """The first step, evaluations and the last have a line with loss, speed, MFU and bytes."""
    out, file = console(terminal=False)
    with progress.display(100, first=True, console=out) as shown:
        shown.step(ONE)
        shown.step(replace(ONE, step=2))
        shown.step(replace(ONE, step=3, validation=3.25, memory_bytes={"parameters": 2048}))
        shown.step(replace(ONE, step=100))
        shown.note("saved")
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 1/100",
        "step 3/100",
        "step 100/100",
        "saved",
    ]
    assert "MFU" not in progress.line(replace(ONE, mfu=None), 100)
    assert lines[0] == "step 1/100  loss 3.5000  128 tokens/s  MFU 25.0%  rank 0 sends 1000 B/step"
    assert "validation 3.2500" in lines[1]
    assert "holds parameters 2.0 KiB" in lines[1]


def test_a_terminal_gets_one_picture_with_everything() -> None:
    """Bar, loss, validation, speed, MFU, bytes and memory by category; the latest of each stays."""
    out, file = console(terminal=True)
    with progress.display(100, first=True, console=out) as shown:
        shown.step(replace(ONE, validation=3.25, memory_bytes={"parameters": 2048}))
        shown.step(replace(ONE, step=2))
    text = file.getvalue()
    last = text[text.rindex("step 2/100") :]
    for part in ("3.5000", "3.2500", "128", "25.0%", "1000 B", "parameters 2.0 KiB"):
        assert part in last


@pytest.mark.parametrize("terminal", [True, False])
def test_a_note_is_text_in_one_line(terminal: bool) -> None:
    """A path may have brackets, which are no markup, and line ends."""
    out, file = console(terminal)
    with progress.display(100, first=True, console=out) as shown:
        shown.note("tokens of data/[ab]/[/x]\n*.txt")
    assert "tokens of data/[ab]/[/x]\\n*.txt" in file.getvalue()


def test_other_ranks_show_nothing() -> None:
    """Rank 1 writes no line."""
    out, file = console(terminal=False)
    with progress.display(100, first=False, console=out) as shown:
        shown.step(ONE)
        shown.note("saved")
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40 * 2048, "2048.0 TiB")],
)
def test_sizes_are_in_the_largest_unit_that_leaves_one(size: int, text: str) -> None:
    """Binary units, one digit."""
    assert progress.size_text(size) == text


def test_the_peak_is_that_of_the_cluster_or_of_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset by the name that CUDA gives, by precision; no other device has an MFU."""
    cuda, plan = torch.device("cuda"), Plan.parse("dp2 bf16")
    for name, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", None), ("L4", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert metrics.peak_flops(None, plan, cuda) == peak
    assert metrics.peak_flops("a100-80gb", Plan(), torch.device("cpu")) == 19.5e12
    assert metrics.peak_flops(None, plan, torch.device("cpu")) is None


def test_a_full_disk_loses_records_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once; records are written again when there is room."""
    with metrics.writer(tmp_path, 0) as file:
        kept = metrics.MetricsWriter(file, Callbacks([]))
        with monkeypatch.context() as patch:
            patch.setattr(Record, "line", _full)
            kept.write(ONE)
            said = kept.take_unwritten()
            kept.write(replace(ONE, step=2))
        assert "step 1 could not be recorded" in said and "No space left on device" in said
        assert kept.take_unwritten() == kept.failure == ""
        kept.write(replace(ONE, step=3))
    assert [record.step for record in metrics.read(tmp_path)] == [3]


def _full(_: Record) -> str:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("what", ["renamed", "removed", "replaced"])
def test_a_folder_that_is_gone_ends_the_run(what: str, tmp_path: Path) -> None:
    """Or the run would write its records into one folder and its checkpoints into another."""
    folder = tmp_path / "run"
    folder.mkdir()
    with metrics.writer(folder, 0) as file:
        kept = metrics.MetricsWriter(file, Callbacks([]))
        kept.write(ONE)
        folder.rename(tmp_path / "other") if what != "removed" else shutil.rmtree(folder)
        if what == "replaced":
            folder.mkdir()
            (folder / metrics.FILE).touch()
        kept.write(replace(ONE, step=2))
    assert "was renamed or removed" in kept.failure and "--resume" in kept.failure
