"""Figures as the numbers of small SVG charts, which report.html.jinja writes.

A plot fills a box of any size: its paths have x from 0 to WIDE and y from 0 to HIGH, and are
stretched to the box. Labels are text beside the box, at places in percent, so that they keep their
size on a phone.

    Plot       lines and areas over steps or moments     Rows     a group of bars for each name
    Panel      cells of a heat map                       Drawing  an SVG of another part
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from shardwise.core.memory_table import MEASURED, TEMPORARY
from shardwise.core.schedule.draw import round_step
from shardwise.prediction.memory_timeline import Event
from shardwise.train.measure.memory_picture import Series
from shardwise.train.measure.progress import size_text, unit_of
from shardwise.train.report.section import (
    MOST_NUMBERS,
    Bars,
    Curve,
    Drawing,
    Figure,
    HeatMap,
    StepPicture,
)

WIDE: Final = 1000
HIGH: Final = 400
MOST_POINTS: Final = 600  # of a line; of more steps, the least and the most of each few
MOST_TIPS: Final = 120  # places of a plot that show their numbers
LETTER: Final = 2.8  # percent of a plot's width that a letter of a label takes

Xy = tuple[float, float]


class Tick(NamedTuple):
    """A label of an axis, and its place in percent."""

    at: float
    text: str


class Path(NamedTuple):
    """A path of a plot; `style` is a class of the template's CSS."""

    style: str
    d: str


class Tip(NamedTuple):
    """A strip of a plot that shows a text under the pointer."""

    x: float
    wide: float
    text: str


class LegendKey(NamedTuple):
    """An entry of the legend; `mark` is "line", "raw", "dash", "dot" or "box"."""

    style: str
    mark: str
    text: str


class Plot(NamedTuple):
    """Paths over a box with two axes."""

    title: str
    x_label: str
    y_label: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    paths: Sequence[Path]
    tips: Sequence[Tip]
    keys: Sequence[LegendKey]
    kind: str = "plot"


class Bar(NamedTuple):
    """One bar: its length in percent."""

    style: str
    percent: float
    text: str
    tip: str


class BarGroups(NamedTuple):
    """A group of bars for each name."""

    title: str
    groups: Sequence[tuple[str, Sequence[Bar]]]
    keys: Sequence[LegendKey]
    kind: str = "rows"


class Cell(NamedTuple):
    """A cell of a heat map: its side of 1, how far in percent, its number if there is room."""

    style: str
    strength: int
    text: str
    tip: str


class Panel(NamedTuple):
    """A heat map: rows of cells by name."""

    title: str
    rows: Sequence[tuple[str, Sequence[Cell]]]
    kind: str = "panel"


class Inline(NamedTuple):
    """A drawing that is an SVG already."""

    svg: str
    kind: str = "inline"


Chart = Plot | BarGroups | Panel | Inline


def charts(figure: Figure | None) -> Sequence[Chart]:
    """The charts of a figure; none if it shows nothing."""
    match figure:
        case Curve():
            return [_loss(figure)]
        case Bars():
            return [_rows(figure)] if figure.most else []
        case StepPicture():
            return [_moments(one, figure.most) for one in figure.series]
        case HeatMap():
            return [_panel(title, rows, figure.columns) for title, rows in figure.panels]
        case Drawing():
            return [Inline(figure.svg)]
        case None:
            return []


# --- the loss --------------------------------------------------------------------------------


def _loss(curve: Curve) -> Plot:
    top = curve.most * 1.05 or 1.0
    first, last = curve.steps[0], max(curve.steps[-1], curve.steps[0] + 1)

    def place(step: float, loss: float) -> Xy:
        return (step - first) / (last - first) * WIDE, HIGH * (1 - min(loss / top, 1.0))

    def line(losses: Sequence[float]) -> str:
        pairs = zip(curve.steps, losses, strict=True)
        return _line([place(*pair) for pair in _thin([p for p in pairs if math.isfinite(p[1])])])

    level = place(first, curve.baseline)[1]
    paths = [
        Path("raw measured", line(curve.losses)),
        Path("dash ddp", f"M0 {level:.1f}H{WIDE}"),
        Path("line measured", line(curve.smoothed)),
    ]
    keys = [
        LegendKey("measured", "line", "training, smoothed"),
        LegendKey("measured", "raw", "each step"),
    ]
    if curve.validation:
        found = [place(*pair) for pair in curve.validation]
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in found)
        paths += [Path("line predicted", _line(found)), Path("dot predicted", dots)]
        keys.append(LegendKey("predicted", "dot", "validation"))
    for step, _ in curve.worlds:
        paths.append(Path("raw ddp", f"M{place(step + 0.5, 0)[0]:.1f} 0V{HIGH}"))
    if curve.worlds:
        keys.append(LegendKey("ddp", "raw", "the number of ranks changed"))
    keys.append(LegendKey("ddp", "dash", f"unigram baseline {curve.baseline:.2f}"))
    return Plot(
        title="Loss of each step",
        x_label="step",
        y_label="loss, nats a token",
        x_ticks=[Tick(100 * (n - first) / (last - first), f"{n:g}") for n in _round(first, last)],
        y_ticks=[Tick(100 * n / top, f"{n:g}") for n in _round(0, top)],
        paths=paths,
        tips=_loss_tips(curve, first, last),
        keys=keys,
    )


def _loss_tips(curve: Curve, first: int, last: int) -> list[Tip]:
    evaluated = dict(curve.validation)
    few = range(0, len(curve.steps), -(-len(curve.steps) // MOST_TIPS))
    shown = sorted({*few, *(n for n, step in enumerate(curve.steps) if step in evaluated)})
    wide = WIDE / max(1, len(shown))
    tips = []
    for n in shown:
        step, loss = curve.steps[n], curve.losses[n]
        now = f"{loss:.4f}" if math.isfinite(loss) else "not finite"
        said = f"step {step}: loss {now}, smoothed {curve.smoothed[n]:.4f}"
        said += f", validation {evaluated[step]:.4f}" if step in evaluated else ""
        tips.append(Tip((step - first) / (last - first) * WIDE - wide / 2, wide, said))
    return tips


def _thin(points: Sequence[Xy]) -> Sequence[Xy]:
    """At most MOST_POINTS, so that a peak stays: the least and the most of each few neighbours."""
    each = -(-2 * len(points) // MOST_POINTS)
    if each <= 2:
        return points
    parts = (points[at : at + each] for at in range(0, len(points), each))
    ends = ((min(part, key=_y), max(part, key=_y)) for part in parts)
    return [point for pair in ends for point in sorted(pair)]


def _y(point: Xy) -> float:
    return point[1]


def _line(points: Sequence[Xy]) -> str:
    return f"M{' '.join(f'{x:.1f} {y:.1f}' for x, y in points)}" if points else ""


def _round(least: float, most: float) -> list[float]:
    """Round numbers from `least` to `most`, at most six."""
    step = round_step((most - least) / 5)
    return [n * step for n in range(math.ceil(least / step), math.floor(most / step) + 1)]


# --- the memory of a step --------------------------------------------------------------------


def _moments(series: Series, most: int) -> Plot:
    """Areas on each other, a column for each event."""
    top, count = 1.1 * most, len(series.events)
    unit, unit_bytes = unit_of(most)
    shown = [
        category
        for category in MEASURED
        if any(event.by_category.get(category) for event in series.events)
    ]
    paths, below = [], [0.0] * count
    for category in shown:
        sizes = [event.by_category.get(category, 0) for event in series.events]
        above = [a + b for a, b in zip(below, sizes, strict=True)]
        paths.append(Path(f"area {category}", _area(below, above, top)))
        below = above
    keys = [LegendKey(category, "box", category) for category in shown]
    if TEMPORARY in shown:
        highest = [float(event.peak) for event in series.events]
        paths.append(Path("thin", f"M{_steps(highest, top)}"))
        keys.append(LegendKey("ink", "line", "most before it"))
    wide = WIDE / count
    tips = [Tip(n * wide, wide, _moment(event)) for n, event in enumerate(series.events)]
    return Plot(
        title=series.title,
        x_label=f"{count} moments of the step, in order",
        y_label=unit,
        x_ticks=_phases(series.events),
        y_ticks=[Tick(100 * n * unit_bytes / top, f"{n:g}") for n in _round(0, top / unit_bytes)],
        paths=paths,
        tips=tips,
        keys=keys,
    )


def _moment(event: Event) -> str:
    parts = (f"{name} {size_text(n)}" for name, n in event.by_category.items() if n)
    return f"{event}: {size_text(event.total)}\n" + "\n".join(parts)


def _steps(sizes: Sequence[float], top: float) -> str:
    """A staircase with a column for each size."""
    wide = WIDE / len(sizes)
    return " ".join(
        f"{x * wide:.1f} {HIGH * (1 - size / top):.1f}"
        for n, size in enumerate(sizes)
        for x in (n, n + 1)
    )


def _area(below: Sequence[float], above: Sequence[float], top: float) -> str:
    back = " ".join(reversed([" ".join(pair) for pair in _pairs(_steps(below, top).split())]))
    return f"M{_steps(above, top)} {back}Z"


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(words[::2], words[1::2], strict=True))


def _phases(events: Sequence[Event]) -> list[Tick]:
    """A label in the middle of each run of events of one kind, if the one before leaves room."""
    ticks, first, taken = list[Tick](), 0, -LETTER
    for kind, run in groupby(event.kind for event in events):
        count = len(list(run))
        middle, half = 100 * (first + count / 2) / len(events), LETTER * (len(kind) + 1) / 2
        if taken <= middle - half and middle + half <= 100 + LETTER:
            ticks.append(Tick(middle, kind))
            taken = middle + half
        first += count
    return ticks


# --- bars and heat maps ----------------------------------------------------------------------


def _rows(bars: Bars) -> BarGroups:
    styles = dict(zip(bars.series, ("measured", "predicted", "ddp"), strict=False))
    groups = [
        (
            name,
            [
                Bar(
                    styles[label],
                    100 * sizes[name] / bars.most,
                    size_text(sizes[name]),
                    f"{name}, {label}: {sizes[name]:,} bytes",
                )
                for label, sizes in bars.series.items()
                if name in sizes
            ],
        )
        for name in bars.names
    ]
    keys = [LegendKey(style, "box", label) for label, style in styles.items()]
    return BarGroups(bars.title, groups, keys)


def _panel(title: str, rows: Mapping[str, Sequence[float]], columns: int) -> Panel:
    def cell(name: str, expert: int, value: float) -> Cell:
        side, strength = "hot" if value > 1 else "cold", round(50 * min(1.0, abs(value - 1)))
        text = f"{value:.2f}" if columns <= MOST_NUMBERS else ""
        return Cell(side, strength, text, f"{name}, expert {expert}: {value:.2f}")

    cells = {
        name: [cell(name, n, value) for n, value in enumerate(row)] for name, row in rows.items()
    }
    return Panel(title, list(cells.items()))
