"""Drawings of a timeline as text and as a figure: one row per rank, as in the papers.

    rank 0  F0 F1 F2 .. .. .. B0 -- B1 -- B2 --       time runs to the right, a column a unit
    rank 1  .. F0 F1 F2 B0 -- ...                     dots: waiting; dashes: an action continues

A cell shows the microbatch. On ranks with two stages, the second stage has lower-case letters; with
more stages, a cell shows the stage too: F2.0.
"""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardwise.core.errors import bad
from shardwise.core.schedule.clock import ActionSpan, Timeline
from shardwise.core.schedule.schedule import Action, Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The largest number of columns of a text.
COLUMNS = 1200

#: The colours of each op, for a rank's even and odd stages.
COLOURS: dict[str, tuple[str, str]] = {
    "F": ("#4c78a8", "#9ecae9"),
    "B": ("#54a24b", "#a1d99b"),
    "I": ("#f2a93b", "#fbd690"),
    "W": ("#b07aa1", "#dcc1d6"),
    "U": ("#e45756", "#f2aeae"),
    "REDUCE": ("#888888", "#bbbbbb"),
}
NAMES: dict[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "U": "update",
    "REDUCE": "reduce",
}


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


def figure(timeline: Timeline, title: str) -> "Figure":
    """The drawing to scale: a box an action, with its microbatch where there is room for it."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows, shortest = _shown(timeline)
    longest = timeline.makespan or 1.0
    inches = min(0.3, 18 * shortest / longest) / shortest
    made: Any = Figure(
        (2 + max(4.0, longest * inches), 1.6 + 0.3 * len(rows)), layout="constrained"
    )
    axes: Any = made.subplots()
    boxes = defaultdict[tuple[int, str], list[tuple[float, float]]](list)
    for rank, row in enumerate(rows):
        for (op, stage, microbatch), start, end in row:
            shade = timeline.schedule.stages(rank).index(stage) % 2
            boxes[rank, COLOURS[op][shade]].append((start, end - start))
            if op in "FBIW" and 0.08 * len(str(microbatch)) <= (end - start) * inches:
                centre = (start + end) / 2, rank
                axes.annotate(str(microbatch), centre, ha="center", va="center", fontsize=7)
    for (rank, colour), spans in boxes.items():
        axes.broken_barh(spans, (rank - 0.45, 0.9), color=colour, ec="white", lw=0.5)
    axes.set(title=title, xlabel="time", xlim=(0, longest), ylim=(len(rows) - 0.5, -0.5))
    axes.set(facecolor="#eee", yticks=range(len(rows)))
    axes.set_yticklabels([f"rank {rank}" for rank in range(len(rows))])
    shown = [op for op in COLOURS if any(COLOURS[op][0] == colour for _, colour in boxes)]
    keys = [Patch(color=COLOURS[op][0], label=NAMES[op]) for op in shown]
    made.legend(handles=keys, loc="outside lower left", ncols=len(keys) or 1, frameon=False)
    return made


def save(figure: "Figure", path: Path, example: str) -> None:
    """Write the figure into the file, whose ending says how; InputError with an `example`."""
    try:
        cast(Any, figure).savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        where = "a file that ends in .svg or .png, in an existing folder that can be written"
        raise bad(f"a picture that cannot be written: {error}", where, example) from error


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
