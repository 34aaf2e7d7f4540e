"""The plots of a run as PNG: the loss; memory and traffic, measured and predicted."""

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.train.measure.progress import size_text, unit_of
from shardwise.train.report.section import MEASURED, MOST_NUMBERS, PREDICTED, Bars, Curve, HeatMap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {MEASURED: "#2a6f97", PREDICTED: "#f4a259"}


def loss(path: Path, curve: Curve) -> None:
    """Training loss (each step, and smoothed), validation loss, and the unigram baseline."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    axes.plot(curve.steps, curve.losses, color=COLOURS[MEASURED], alpha=0.25, linewidth=0.8)
    axes.plot(curve.steps, curve.smoothed, color=COLOURS[MEASURED], label="training, smoothed")
    if curve.validation:
        evaluated = zip(*curve.validation, strict=True)
        axes.plot(*evaluated, "o-", color=COLOURS[PREDICTED], label="validation")
    label = f"unigram baseline {curve.baseline:.2f}"
    axes.axhline(curve.baseline, color="grey", linestyle="--", label=label)
    for step, ranks in curve.worlds:
        axes.axvline(step + 0.5, color="grey", linewidth=0.8)
        axes.annotate(f"{ranks} ranks", (step + 0.5, 0), rotation=90, color="grey", fontsize=8)
    axes.set(xlabel="step", ylabel="loss, nats a token", ylim=(0, curve.most * 1.05))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def bars(path: Path, found: Bars) -> None:
    """A group of bars for each name, all in the unit of the largest."""
    series, names = found.series, found.names
    unit, unit_bytes = unit_of(found.most)
    figure = new_figure(8, 1.2 + 0.25 * (1 + len(series)) * max(1, len(names)))
    axes = figure.subplots()
    axes.set(title=found.title, xlabel=unit)
    height = 0.8 / len(series)
    for place, (label, sizes) in enumerate(series.items()):
        shift = (place - (len(series) - 1) / 2) * height
        there = [(at + shift, sizes[name]) for at, name in enumerate(names) if name in sizes]
        if there:
            at, sized = zip(*there, strict=True)
            lengths, colour = [n / unit_bytes for n in sized], COLOURS[label]
            boxes = axes.barh(at, lengths, 0.9 * height, color=colour, label=label)
            axes.bar_label(boxes, labels=[f" {size_text(n)}" for n in sized], fontsize=8)
    if found.most:
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        figure.legend(loc="outside lower center", ncols=len(series), frameon=False)
    else:
        axes.clear()
        axes.set_title(found.title)
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing", transform=axes.transAxes, ha="center")
    figure.savefig(path, dpi=120)


def heat_map(path: Path, found: HeatMap) -> None:
    """Rows of numbers around 1 by name, as colours; up to MOST_NUMBERS in a row also in digits.

    A panel for each title, all with rows of the same names.
    """
    panels, columns = found.panels, found.columns
    names = list(panels[0][1])
    height = 1.2 + len(panels) * (0.6 + 0.35 * len(names))
    figure = new_figure(2 + max(6.0, 0.5 * columns), height)
    for axes, (title, rows) in zip(figure.subplots(len(panels)), panels, strict=True):
        image = axes.imshow([*rows.values()], vmin=0.0, vmax=2.0, cmap="RdBu_r", aspect="auto")
        axes.set_title(title, fontsize=9)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        for y, row in enumerate(rows.values() if columns <= MOST_NUMBERS else ()):
            for x, value in enumerate(row):
                colour = "white" if abs(value - 1) > 0.7 else "black"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
        figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=120)


def new_figure(width: float, height: float) -> "Figure":
    """A figure on the Agg canvas, which needs no window system and no state of pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
