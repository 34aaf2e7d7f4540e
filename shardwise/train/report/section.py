"""What a report consists of, as values: sections with a figure, sentences and a table.

A figure holds numbers, not a drawing: plots.py draws it.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

TOTAL: Final = "total"
MOST_NUMBERS: Final = 16
NUMBER: Final = re.compile(r"-|[0-9][0-9,.]*%?")
MEASURED, PREDICTED = "measured", "predicted"


class Curve(NamedTuple):
    """The loss in nats a token: of each step, smoothed, of evaluations by step, the baseline.

    `worlds` has the number of ranks after each step at which it changed.
    """

    steps: Sequence[int]
    losses: Sequence[float]
    smoothed: Sequence[float]
    validation: Sequence[tuple[int, float]]
    baseline: float
    worlds: Sequence[tuple[int, int]] = ()

    @property
    def most(self) -> float:
        """The top of the picture: the baseline, or the first loss if that is above it."""
        return max([self.baseline, *filter(math.isfinite, self.losses[:1])])


class Bars(NamedTuple):
    """Bytes by name, of each series; a series has its TOTAL if there are several names."""

    title: str
    series: Mapping[str, Mapping[str, int]]

    @property
    def names(self) -> Sequence[str]:
        """The names of all series, TOTAL last."""
        every = dict.fromkeys(name for sizes in self.series.values() for name in sizes)
        return [name for name in every if name != TOTAL] + [TOTAL] * (TOTAL in every)

    @property
    def most(self) -> int:
        """The longest bar."""
        return max([0, *(n for sizes in self.series.values() for n in sizes.values())])


class HeatMap(NamedTuple):
    """Rows of numbers around 1 by name; a panel for each title, all with rows of the same names."""

    panels: Sequence[tuple[str, Mapping[str, Sequence[float]]]]

    @property
    def columns(self) -> int:
        """The numbers of the longest row; above MOST_NUMBERS they are shown as colours only."""
        return max(len(row) for row in self.panels[0][1].values())


class Drawing(NamedTuple):
    """A figure that is an SVG already."""

    svg: str


Figure = Curve | Bars | HeatMap | Drawing


class ReportTable(NamedTuple):
    """The cells of a table as text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def numbers(self) -> Sequence[bool]:
        """Whether a column has numbers only."""
        columns = zip(*self.rows, strict=True) if self.rows else [("",)] * len(self.head)
        return [all(NUMBER.fullmatch(cell) for cell in column) for column in columns]


@dataclass(frozen=True)
class Section:
    """A part of a report. `picture` is the figure's file for report.md, beside it.

    Text in `backquotes` is code.
    """

    title: str
    figure: Figure | None = None
    picture: str = ""
    sentences: Sequence[str] = ()
    table: ReportTable | None = None


class Card(NamedTuple):
    """A key figure: a name, a value, and a word on it."""

    name: str
    value: str
    note: str


class Check(NamedTuple):
    """Whether what was measured is what was predicted; None if that cannot be said with yes or no.

    `said` is the answer in words.
    """

    name: str
    agrees: bool | None
    said: str = ""

    def __str__(self) -> str:
        words = {True: "as predicted", False: "not as predicted", None: "not predicted"}
        return f"{self.name}: {self.said or words[self.agrees]}"


@dataclass(frozen=True)
class ReportContents:
    """All that a report says; each file of it is a form of this. `rows` is the table of the run.

    `files` are further files beside the report, by name: what makes their text.
    """

    title: str
    about: str
    headline: str
    checks: Sequence[Check]
    cards: Sequence[Card]
    rows: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    files: Mapping[str, Callable[[], str]] = field(default_factory=dict[str, Callable[[], str]])
