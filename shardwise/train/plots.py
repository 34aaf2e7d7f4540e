"""The plots of a run as SVG: the loss; memory and traffic, measured and predicted; experts."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardwise.train.metrics import Record
from shardwise.train.progress import size_text, unit_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#2a6f97", "#f4a259")  # measured, predicted
MOST_NUMBERS = 16  # experts of a layer whose loads are written too


def loss(
    records: Sequence[Record],
    smoothed: Sequence[float],
    baseline: float,
    worlds: Sequence[tuple[int, int]],
) -> str:
    """Training loss (each step, and smoothed), validation loss, and the unigram baseline."""
    figure = new_figure(8, 4.5)
    axes, (blue, orange) = figure.subplots(), COLOURS
    steps, losses = [r.step for r in records], [r.loss for r in records]
    axes.plot(steps, losses, color=blue, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smoothed, color=blue, label="training, smoothed")
    evaluated = [(r.step, r.validation) for r in records if r.validation is not None]
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", color=orange, label="validation")
    axes.axhline(baseline, color="grey", linestyle="--", label=f"unigram baseline {baseline:.2f}")
    for step, ranks in worlds:
        axes.axvline(step + 0.5, color="grey", linewidth=0.8)
        axes.annotate(f"{ranks} ranks", (step + 0.5, 0), rotation=90, color="grey", fontsize=8)
    most = max([baseline, *filter(math.isfinite, losses[:1])])
    axes.set(xlabel="step", ylabel="loss, nats a token", ylim=(0, most * 1.05))
    axes.legend(frameon=False)
    return svg(figure)


def bars(title: str, names: Sequence[str], series: Mapping[str, Mapping[str, int]]) -> str:
    """A group of bars for each name, all in one unit."""
    unit, unit_bytes = unit_of(max([0, *(n for sizes in series.values() for n in sizes.values())]))
    figure = new_figure(8, 1.2 + 0.25 * (1 + len(series)) * max(1, len(names)))
    axes, height = figure.subplots(), 0.8 / len(series)
    axes.set(title=title, xlabel=unit)
    for place, (label, sizes) in enumerate(series.items()):
        at = [names.index(name) + (place - (len(series) - 1) / 2) * height for name in sizes]
        lengths = [n / unit_bytes for n in sizes.values()]
        boxes = axes.barh(at, lengths, 0.9 * height, color=COLOURS[place], label=label)
        axes.bar_label(boxes, labels=[f" {size_text(n)}" for n in sizes.values()], fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    figure.legend(loc="outside lower center", ncols=len(series), frameon=False)
    return svg(figure)


def heat_maps(loads: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """The loads of experts by layer, in the first and the last tenth of the steps, as colours."""
    layers = [*loads["first"]]
    columns = max(map(len, loads["first"].values()))
    height = 1.2 + len(loads) * (0.6 + 0.35 * len(layers))
    figure = new_figure(2 + max(6.0, 0.5 * columns), height)
    for axes, (tenth, rows) in zip(figure.subplots(len(loads)), loads.items(), strict=True):
        image = axes.imshow([*rows.values()], vmin=0.0, vmax=2.0, cmap="RdBu_r", aspect="auto")
        axes.set_title(f"{tenth} tenth of the steps, in multiples of an even load", fontsize=9)
        axes.set_yticks(range(len(layers)), layers, fontsize=7)
        for y, row in enumerate(rows.values() if columns <= MOST_NUMBERS else ()):
            for x, value in enumerate(row):
                colour = "white" if abs(value - 1) > 0.7 else "black"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
        figure.colorbar(image, ax=axes)
    return svg(figure)


def new_figure(width: float, height: float) -> "Figure":
    """A figure without pyplot, which has state and a window system."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def svg(figure: "Figure") -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()
