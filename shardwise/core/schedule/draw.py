"""Drawings of a timeline as text and SVG: one row per rank, as in the papers.

    rank 0  F0 F1 F2 .. .. .. B0 -- B1 -- B2 --       time runs to the right, a column a unit
    rank 1  .. F0 F1 F2 B0 -- ...                     dots: waiting; dashes: an action continues

A cell shows the microbatch. On ranks with two stages, the second stage has lower-case letters; with
more stages, a cell shows the stage too: F2.0.
"""

import math
from html import escape

from shardwise.core.schedule.clock import ActionSpan, Timeline
from shardwise.core.schedule.schedule import Action, Schedule

#: The largest number of columns of a drawing.
COLUMNS = 1200

#: The colours of each op, for a rank's even and odd stages.
COLOURS: dict[str, tuple[str, str]] = {
    "F": ("#4c78a8", "#9ecae9"),
    "B": ("#54a24b", "#a1d99b"),
    "I": ("#f2a93b", "#fbd690"),
    "W": ("#b07aa1", "#dcc1d6"),
    "U": ("#e45756", "#f2aeae"),
    "REDUCE": ("#888888", "#bbbbbb"),
    "GATHER": ("#888888", "#bbbbbb"),
}
NAMES: dict[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "U": "update",
    "REDUCE": "reduce",
    "GATHER": "gather",
}
_FONT = 'font-family="sans-serif" font-size="11"'
#: Pixels in an SVG: left of time 0, height of a row, above and below a chart's rows.
_LEFT, _ROW, _HEAD, _AXIS = 60, 26, 34, 20
#: Pixels for one letter of a title, and for one entry of the legend.
_LETTER, _ENTRY = 8, 130


def label(action: Action, schedule: Schedule) -> str:
    stages = schedule.stages(schedule.home[action.stage])
    if len(stages) > 2:
        return str(action)
    name = f"{action.op[0]}{action.microbatch}"
    return name.lower() if stages.index(action.stage) else name


def as_text(timeline: Timeline) -> str:
    """The drawing as text; a column is the time of the shortest action."""
    rows, shortest = _shown(timeline)
    unit = max(shortest, timeline.makespan / COLUMNS)
    names = {span: label(span.action, timeline.schedule) for row in rows for span in row}
    width = max(map(len, names.values()), default=2)
    lines: list[str] = []
    for rank, row in enumerate(rows):
        cells = ["." * width] * _column(timeline.makespan, unit)
        for span in row:
            first, last = _column(span.start, unit), _column(span.end, unit)
            cells[first:last] = ["-" * width] * (last - first)
            cells[first : first + 1] = [names[span]] * (first < last)
        lines.append(f"rank {rank:<3}" + " ".join(cell.ljust(width) for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def as_svg(timeline: Timeline, title: str) -> str:
    """The drawing as SVG, to scale; a tooltip on each cell shows its action and times."""
    rows, shortest = _shown(timeline)
    longest = timeline.makespan
    scale = min(26 / shortest, COLUMNS / (longest or 1.0))
    ops = [op for op in COLOURS if any(span.action.op == op for row in rows for span in row)]
    wide = max(_LEFT + longest * scale, _LETTER * len(title), _LEFT + _ENTRY * len(ops)) + 10
    foot = _HEAD + _AXIS + _ROW * len(rows)
    styles = "".join(
        f".{op}{shade}{{fill:{colour}}}" for op in ops for shade, colour in enumerate(COLOURS[op])
    )
    size = f'width="{wide:.0f}" height="{foot + 34}"'
    box = f"0 0 {wide:.0f} {foot + 34}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" {size} {_FONT}>',
        f"<style>{styles}.m{{text-anchor:middle}}</style>",
        f'<rect {size} fill="#fff"/>',
    ]
    parts += _chart(rows, timeline, title, scale)
    parts += _axis(longest, foot - _AXIS, scale)
    for k, op in enumerate(ops):
        x, y = _LEFT + _ENTRY * k, foot + 8
        parts.append(f'<rect class="{op}0" x="{x}" y="{y}" width="14" height="14"/>')
        parts.append(f'<text x="{x + 19}" y="{y + 11}">{NAMES[op]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _chart(rows: list[list[ActionSpan]], timeline: Timeline, title: str, scale: float) -> list[str]:
    parts = [f'<text x="10" y="20" font-size="13">{escape(title)}</text>']
    for rank, row in enumerate(rows):
        y = _HEAD + _ROW * rank
        waiting = f'width="{timeline.makespan * scale:.2f}" height="22" fill="#eee"'
        parts.append(f'<text x="10" y="{y + 15}">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" {waiting}/>')
        parts += [_cell(span, timeline.schedule, y, scale) for span in row]
    return parts


def _axis(makespan: float, top: int, scale: float) -> list[str]:
    """The time axis below the rows; `scale` is in pixels per 1 of makespan."""
    parts = [f'<text x="10" y="{top + 12}">time</text>']
    step = round_step(60 / scale)
    for k in range(int(makespan / step + 1e-6) + 1):
        x = _LEFT + k * step * scale
        parts.append(f'<path d="M{x:.2f} {top - 2}v4" stroke="#666"/>')
        parts.append(f'<text class="m" x="{x:.2f}" y="{top + 12}">{k * step:g}</text>')
    return parts


def round_step(least: float) -> float:
    """The smallest of ..., 0.5, 1, 2, 5, 10, 20, ... that is not below `least`."""
    ten = 10.0 ** math.floor(math.log10(least))
    return next(ten * of for of in (1, 2, 5, 10) if ten * of >= least * (1 - 1e-9))


def _cell(span: ActionSpan, schedule: Schedule, y: int, scale: float) -> str:
    action, start, end = span
    shade = schedule.stages(schedule.home[action.stage]).index(action.stage) % 2
    x, wide = _LEFT + start * scale, (end - start) * scale
    name = str(action.microbatch) if action.op in ("F", "B", "I", "W") else ""
    text = f'<text class="m" x="{x + wide / 2:.2f}" y="{y + 15}">{name}</text>'
    return (
        f'<g><title>{action} {start:g} to {end:g}</title><rect class="{action.op}{shade}" '
        f'x="{x:.2f}" y="{y}" width="{wide:.2f}" height="22" stroke="#fff"/>'
        f"{text if name and 7 * len(name) <= wide else ''}</g>"
    )


def _shown(timeline: Timeline) -> tuple[list[list[ActionSpan]], float]:
    """The actions that take time, and the shortest time of one."""
    rows = [
        [span for span in row if span.end > span.start and span.action.op in COLOURS]
        for row in timeline.spans
    ]
    return rows, min((span.end - span.start for row in rows for span in row), default=1.0)


def _column(time: float, unit: float) -> int:
    """The column of `time`, robust against rounding in sums of costs."""
    return int(time / unit + 0.5 + 1e-6)
