"""Progress of a run: lines for a log file, and a bar below them on a terminal."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

from shardwise.core.errors import one_line
from shardwise.train import metrics
from shardwise.train.metrics import Record

EVERY_S = 10.0
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Shown:
    """Prints lines for the first and last step, evaluations, and every ten seconds; and notes."""

    def __init__(self, console: Console | None, steps: int, bar: Progress | None = None) -> None:
        self._console, self._steps, self._bar = console, steps, bar
        self._next_s = 0.0
        self._task: TaskID | None = None

    def step(self, record: Record) -> None:
        """Move the bar, and show the record if it is time for a line."""
        if self._bar is not None:
            if self._task is None:  # the time that is left is that of this program's steps
                start = record.step - 1
                self._task = self._bar.add_task("step", total=self._steps, completed=start)
            self._bar.update(self._task, completed=record.step)
        due = time.monotonic() >= self._next_s or record.validation is not None
        if self._console is not None and (due or record.step == self._steps):
            self._next_s = time.monotonic() + EVERY_S
            self._console.print(line(record, self._steps), soft_wrap=True)

    def note(self, text: str) -> None:
        if self._console is not None:
            self._console.print(one_line(text), soft_wrap=True, markup=False)


@contextmanager
def display(steps: int, first: bool, console: Console | None = None) -> Iterator[Shown]:
    """The display for the kind of output; silent unless this is the `first` rank."""
    console = console or Console(file=sys.stdout, highlight=False, markup=False)
    if first and console.is_terminal:
        columns = BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, expand=True) as bar:
            yield Shown(console, steps, bar)
    else:
        yield Shown(console if first else None, steps)


def line(record: Record, steps: int) -> str:
    """The record as one line of a log."""
    parts = [f"step {record.step}/{steps}", f"loss {record.loss:.4f}"]
    parts += [f"validation {record.validation:.4f}"] if record.validation is not None else []
    parts += [f"{record.tokens_per_s:,.0f} tokens/s"]
    parts += [] if record.mfu is None else [f"MFU {record.mfu:.1%}"]
    parts += [f"rank 0 sends {size_text(record.sent_bytes)}/step"]
    parts += [metrics.words(record)] if record.expert_loads else []
    parts += ["overflow, step skipped"] if record.skipped else []
    memory = record.memory_bytes or {}
    parts += ["holds " + " ".join(f"{k} {size_text(v)}" for k, v in memory.items())] * bool(memory)
    return "  ".join(parts)


def size_text(size_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    unit, unit_bytes = unit_of(size_bytes)
    return f"{size_bytes / unit_bytes:.{0 if unit == 'B' else 1}f} {unit}"


def unit_of(size_bytes: float) -> tuple[str, int]:
    """The largest unit not above the number, and its bytes: 1536 -> ('KiB', 1024)."""
    power = 0
    while power < len(UNITS) - 1 and size_bytes >= 1024 ** (power + 1):
        power += 1
    return UNITS[power], 1024**power


def duration(seconds: float) -> str:
    """95 -> '1:35'."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def ranks_text(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"
