"""A schedule's timeline as PNG, drawn with matplotlib."""

from pathlib import Path

from shardwise.core.schedule.clock import Timeline
from shardwise.core.schedule.draw import COLOURS, NAMES, label


def as_png(path: Path, timeline: Timeline, title: str) -> None:
    """One bar a rank, a box for each action, to scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    spans = [(rank, span) for rank, row in enumerate(timeline.spans) for span in row]
    wide = min(max(6.0, len(spans) / max(schedule.ranks, 1) * 0.4), 40.0)
    figure = Figure(figsize=(wide, 1.2 + 0.45 * schedule.ranks), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for rank, (action, start, end) in spans:
        if end == start:
            continue
        shade = schedule.stages(rank).index(action.stage) % 2
        colour = COLOURS[action.op][shade]
        axes.barh(rank, end - start, 0.9, left=start, color=colour, edgecolor="white")
        if (end - start) / timeline.makespan * wide > 0.2:
            name = label(action, schedule)
            axes.text((start + end) / 2, rank, name, ha="center", va="center", fontsize=8)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.invert_yaxis()
    axes.set(title=title, xlim=(0, timeline.makespan or 1), xlabel="time")
    axes.set_facecolor("#eeeeee")
    ops = {span.action.op for _, span in spans if span.end > span.start}
    handles = [Patch(color=COLOURS[op][0], label=NAMES[op]) for op in COLOURS if op in ops]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=120, format="png")
