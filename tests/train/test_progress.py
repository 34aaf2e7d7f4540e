"""What a run shows: a picture on a terminal, lines elsewhere, nothing from other ranks."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from shardwise.train import progress
from tests.train.test_metrics import ONE


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
