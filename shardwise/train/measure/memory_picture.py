"""The memory of a step: a table of the most of each category, and a picture of all events.

A measurement and a prediction are drawn to one scale.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rich.table import Table

from shardwise.core.errors import bad
from shardwise.core.memory_table import GATHERED, KEPT, PREDICTED, TEMPORARY, Event
from shardwise.train.measure.progress import unit_of
from shardwise.train.report.plots import new_figure

#: The colour of each category.
COLOURS: Final[dict[str, str]] = {
    "parameters": "#2a6f97",
    GATHERED: "#89c2d9",
    "gradients": "#f4a259",
    "optimizer": "#8f5a9e",
    "buffers": "#b0b0b0",
    KEPT: "#5b8c5a",
    TEMPORARY: "#d0d0d0",
}
NOT_PREDICTED: Final = "not predicted"


class Series(NamedTuple):
    """The events of one step, under a title."""

    title: str
    events: Sequence[Event]

    @property
    def highest(self) -> Event:
        """The event with the most bytes."""
        return max(self.events, key=lambda event: event.total)


def peaks(series: Sequence[Series]) -> Table:
    """By category, the most bytes at an event, and the event."""
    table = Table("bytes at the most", *(one.title for one in series))
    highest = [max(one.events, key=lambda event: event.peak) for one in series]
    between = (
        f"{event.peak:,} before {event}" if TEMPORARY in event.by_category else NOT_PREDICTED
        for event in highest
    )
    for category in COLOURS:
        table.add_row(category, *(_most(one, category) for one in series))
    table.add_row("all", *(f"{one.highest.total:,} {one.highest}" for one in series))
    table.add_row("all, between events", *between)
    return table


def _most(series: Series, category: str) -> str:
    most = max(series.events, key=lambda event: event.by_category.get(category, 0))
    if category not in most.by_category:
        return NOT_PREDICTED
    return f"{most.by_category[category]:,} {most if most.by_category[category] else ''}".strip()


def draw(path: Path, series: Sequence[Series]) -> None:
    """Draw the series above each other to one scale, in the format of the file's ending (svg, png).

    Raises InputError if the file cannot be written.
    """
    most = max(max(event.total, event.peak) for one in series for event in one.events)
    unit, unit_bytes = unit_of(most)
    figure = new_figure(9, 0.6 + 3.4 * len(series))
    for axes, one in zip(figure.subplots(len(series), squeeze=False)[:, 0], series, strict=True):
        stored = [event.by_category for event in one.events]
        shown = [c for c in (*PREDICTED, TEMPORARY) if any(found.get(c) for found in stored)]
        at = range(len(one.events))
        sizes = [[found.get(c, 0) / unit_bytes for found in stored] for c in shown]
        axes.stackplot(at, sizes, labels=shown, colors=[COLOURS[c] for c in shown], step="mid")
        if TEMPORARY in shown:
            highest = [event.peak / unit_bytes for event in one.events]
            axes.step(
                at, highest, where="mid", color="black", linewidth=0.8, label="most before it"
            )
        axes.set(title=one.title, ylabel=unit, ylim=(0, 1.2 * most / unit_bytes))
        apart = -(-len(one.events) // 32)
        names = [str(event) for event in one.events][::apart]
        axes.set_xticks([*at][::apart], names, rotation=90, fontsize=7)
        axes.legend(frameon=False, fontsize=7, ncols=4, loc="upper left")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        where = "a file that ends in .svg or .png, in an existing folder that can be written"
        raise bad(
            f"a picture that cannot be written: {error}", where, "--timeline step.svg"
        ) from error
