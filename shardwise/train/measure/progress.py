"""Progress of a run: a live table on a terminal, or lines for a log file.

LiveProgress    a table that is redrawn: bar, loss, speed, bytes, memory
PlainProgress   lines for a log file: the first step, then one every ten seconds
SilentProgress  nothing, on ranks other than the first
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardwise.core.errors import one_line
from shardwise.train.measure import experts
from shardwise.train.measure.metrics import Record

PLAIN_EVERY_S = 10.0
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Progress(Protocol):
    """Shows each step's record, and notes (a checkpoint was saved, a signal was received)."""

    def step(self, record: Record) -> None: ...
    def note(self, text: str) -> None: ...


class SilentProgress:
    """Shows nothing."""

    def step(self, record: Record) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class PlainProgress:
    """A line for the first and last step, for evaluations, and every ten seconds."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._next_s = 0.0

    def step(self, record: Record) -> None:
        """Show the record if it is time for a line."""
        due = time.monotonic() >= self._next_s or record.validation is not None
        if due or record.step == self._steps:
            self._next_s = time.monotonic() + PLAIN_EVERY_S
            self._console.print(line(record, self._steps), soft_wrap=True)

    def note(self, text: str) -> None:
        """Show the text on a line of its own."""
        self._console.print(one_line(text), soft_wrap=True, markup=False)


class LiveProgress:
    """A table that is redrawn at each step, with notes above it."""

    def __init__(self, live: RichLive, steps: int) -> None:
        self._live = live
        self._steps = steps
        self._validation: float | None = None
        self._memory: dict[str, int] = {}
        self._begin: tuple[float, int] | None = None

    def step(self, record: Record) -> None:
        """Draw the record; missing values stay unchanged."""
        if self._begin is None:
            self._begin = (time.monotonic(), record.step)
        self._validation = record.validation or self._validation
        self._memory = record.memory_bytes or self._memory
        self._live.update(self._picture(record))

    def note(self, text: str) -> None:
        """Show the text above the table."""
        self._live.console.print(one_line(text), soft_wrap=True, markup=False)

    def _picture(self, record: Record) -> Group:
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(justify="right")
        bar.add_row(ProgressBar(self._steps, record.step), self._left(record))
        table = Table.grid(padding=(0, 3))
        for label, value in {**values(record), "validation": loss_text(self._validation)}.items():
            table.add_row(Text(label, style="dim"), value)
        memory = "  ".join(f"{name} {size_text(size)}" for name, size in self._memory.items())
        table.add_row(Text("memory, rank 0", style="dim"), memory)
        return Group(bar, table)

    def _left(self, record: Record) -> str:
        began_s, first = self._begin or (time.monotonic(), record.step)
        done = record.step - first
        text = f"step {record.step}/{self._steps}"
        if not done:
            return text
        left_s = (time.monotonic() - began_s) / done * (self._steps - record.step)
        return f"{text}  {duration(left_s)} left"


@contextmanager
def display(steps: int, first: bool, console: Console | None = None) -> Iterator[Progress]:
    """The display for the kind of output; silent unless this is the `first` rank."""
    console = console or Console(file=sys.stdout, highlight=False, markup=False)
    if not first:
        yield SilentProgress()
    elif console.is_terminal:
        with RichLive(console=console, refresh_per_second=8) as live:
            yield LiveProgress(live, steps)
    else:
        yield PlainProgress(console, steps)


def values(record: Record) -> dict[str, str]:
    """The record's numbers as text."""
    return {
        "loss": loss_text(record.loss),
        "tokens/s": f"{record.tokens_per_s:,.0f}",
        **({} if record.mfu is None else {"MFU": f"{record.mfu:.1%} of the device's peak"}),
        "bytes/step": f"{size_text(record.sent_bytes)} sent by rank 0",
        **({"experts": experts.words(record)} if record.expert_loads else {}),
    }


def line(record: Record, steps: int) -> str:
    """The record as one line of a log."""
    parts = [f"step {record.step}/{steps}", f"loss {record.loss:.4f}"]
    parts += [f"validation {record.validation:.4f}"] if record.validation is not None else []
    parts += [f"{record.tokens_per_s:,.0f} tokens/s"]
    parts += [] if record.mfu is None else [f"MFU {record.mfu:.1%}"]
    parts += [f"rank 0 sends {size_text(record.sent_bytes)}/step"]
    parts += [experts.words(record)] if record.expert_loads else []
    parts += ["overflow, step skipped"] if record.skipped else []
    memory = record.memory_bytes or {}
    parts += ["holds " + " ".join(f"{k} {size_text(v)}" for k, v in memory.items())] * bool(memory)
    return "  ".join(parts)


def loss_text(value: float | None) -> str:
    """A loss with four digits, or a dash."""
    return "-" if value is None else f"{value:.4f}"


def size_text(size_bytes: float) -> str:
    """A number of bytes in the largest unit of which it has at least one: 1536 -> '1.5 KiB'."""
    unit, unit_bytes = unit_of(size_bytes)
    return f"{size_bytes / unit_bytes:.{0 if unit == 'B' else 1}f} {unit}"


def unit_of(size_bytes: float) -> tuple[str, int]:
    """The largest unit not above the number, and its bytes: 1536 -> ('KiB', 1024)."""
    power = 0
    while power < len(UNITS) - 1 and size_bytes >= 1024 ** (power + 1):
        power += 1
    return UNITS[power], 1024**power


def duration(seconds: float) -> str:
    """Seconds as minutes and seconds: 95 -> '1:35'."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def ranks_text(ranks: int) -> str:
    """1 -> '1 rank', 2 -> '2 ranks'."""
    return f"{ranks} rank{'s' * (ranks > 1)}"
