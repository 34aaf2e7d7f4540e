"""The plots of a run as PNG: the loss; memory and traffic: measured, predicted, and of ddp."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.train.metrics import Record
from shardwise.train.progress import size_text, unit_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURED, PREDICTED, BASELINE = "#2a6f97", "#f4a259", "#b0b0b0"
TOTAL = "total"
MOST_NUMBERS = 16


def loss(path: Path, records: Sequence[Record], unigram: float) -> None:
    """Training loss (each step, and smoothed), validation loss, and the unigram baseline."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    steps = [record.step for record in records]
    losses = [record.loss for record in records]
    top = max([unigram, *filter(math.isfinite, losses[:1])])
    axes.plot(steps, losses, color=MEASURED, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(losses), color=MEASURED, label="training, smoothed")
    evaluated = [(r.step, r.validation) for r in records if r.validation is not None]
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", color=PREDICTED, label="validation")
    axes.axhline(unigram, color="grey", linestyle="--", label=f"unigram baseline {unigram:.2f}")
    axes.set(xlabel="step", ylabel="loss, nats a token", ylim=(0, top * 1.05))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def bars(
    path: Path,
    title: str,
    measured: dict[str, int],
    predicted: dict[str, int],
    baseline: dict[str, int] | None = None,
) -> None:
    """Measured and predicted bytes, and those of `ddp` if `baseline` is given.

    One group of bars per category, and their sums, all in the unit of the largest.
    """
    series = [(measured, MEASURED, "measured"), (predicted, PREDICTED, "formula")]
    series += [(baseline, BASELINE, "ddp on the same ranks")] if baseline else []
    categories = list(dict.fromkeys(name for sizes, *_ in series for name in sizes))
    several = len(categories) > 1
    summed = [
        (sizes | {TOTAL: sum(sizes.values())} if several else sizes, *how) for sizes, *how in series
    ]
    names = [*categories, *[TOTAL] * several]
    unit, unit_bytes = unit_of(max([0, *(n for sizes, *_ in summed for n in sizes.values())]))
    figure = new_figure(8, 1.2 + 0.25 * (1 + len(series)) * max(1, len(names)))
    axes = figure.subplots()
    axes.set(title=title, xlabel=unit)
    height = 0.8 / len(series)
    for place, (sizes, colour, label) in enumerate(summed):
        shift = (place - (len(series) - 1) / 2) * height
        there = [(at + shift, sizes[name]) for at, name in enumerate(names) if name in sizes]
        if there:
            at, sized = zip(*there, strict=True)
            drawn = axes.barh(
                at, [n / unit_bytes for n in sized], 0.9 * height, color=colour, label=label
            )
            axes.bar_label(drawn, labels=[f" {size_text(n)}" for n in sized], fontsize=8)
    if any(n for sizes, *_ in series for n in sizes.values()):
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        figure.legend(loc="outside lower center", ncols=len(series), frameon=False)
    else:
        axes.clear()
        axes.set_title(title)
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing", transform=axes.transAxes, ha="center")
    figure.savefig(path, dpi=120)


def heat_map(path: Path, panels: Sequence[tuple[str, dict[str, list[float]]]]) -> None:
    """Rows of numbers around 1 by name, as colours; up to MOST_NUMBERS in a row also in digits.

    A panel for each title, all with rows of the same names.
    """
    names = list(panels[0][1])
    columns = max(len(row) for row in panels[0][1].values())
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


def smooth(losses: Sequence[float], weight: float = 0.9) -> list[float]:
    """The exponential moving mean with bias correction, as Adam corrects its moments.

    A loss that is not finite, of a step that was skipped, is passed over.
    """
    result, mean, left = [], 0.0, 1.0
    for value in losses:
        if not math.isfinite(value):
            result.append(result[-1] if result else math.nan)
            continue
        mean = weight * mean + (1 - weight) * value
        left *= weight
        result.append(mean / (1 - left))
    return result


def new_figure(width: float, height: float) -> "Figure":
    """A figure on the Agg canvas, which needs no window system and no state of pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
