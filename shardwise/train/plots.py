"""The pictures of a run, as PNG: the loss, and measured memory and bytes beside their formulas."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.train.metrics import Record
from shardwise.train.progress import size_text, unit_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURED, PREDICTED = "#2a6f97", "#f4a259"


def loss(path: Path, records: Sequence[Record], unigram: float) -> None:
    """Training loss (each step, and smoothed), validation loss, and the unigram baseline."""
    figure = _figure(8, 4.5)
    axes = figure.subplots()
    steps = [record.step for record in records]
    losses = [record.loss for record in records]
    axes.plot(steps, losses, color=MEASURED, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smoothed(losses), color=MEASURED, label="training, smoothed")
    held = [(record.step, record.validation) for record in records if record.validation is not None]
    if held:
        axes.plot(*zip(*held, strict=True), "o-", color=PREDICTED, label="validation")
    axes.axhline(unigram, color="grey", linestyle="--", label=f"unigram baseline {unigram:.2f}")
    axes.set(xlabel="step", ylabel="loss, nats a token", ylim=(0, max(unigram, losses[0]) * 1.05))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def pairs(path: Path, measured: dict[str, int], predicted: dict[str, int], title: str) -> None:
    """Measured beside predicted, one pair of bars a category, in the unit of the largest."""
    names = list(dict.fromkeys([*measured, *predicted]))
    unit, unit_bytes = unit_of(max([0, *measured.values(), *predicted.values()]))
    figure = _figure(8, 1.2 + 0.6 * len(names))
    axes = figure.subplots()
    axes.set(title=title, xlabel=unit)
    series = ((measured, MEASURED, "measured", -0.2), (predicted, PREDICTED, "formula", 0.2))
    for sizes, colour, label, shift in series:
        there = [(at + shift, sizes[name]) for at, name in enumerate(names) if name in sizes]
        if there:
            at, sized = zip(*there, strict=True)
            bars = axes.barh(at, [n / unit_bytes for n in sized], 0.36, color=colour, label=label)
            axes.bar_label(bars, labels=[f" {size_text(n)}" for n in sized], fontsize=8)
    if any((*measured.values(), *predicted.values())):
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.legend(frameon=False, loc="best")
    else:
        axes.clear()
        axes.set_title(title)
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing", transform=axes.transAxes, ha="center")
    figure.savefig(path, dpi=120)


def smoothed(losses: Sequence[float], weight: float = 0.9) -> list[float]:
    """The exponential moving mean, without the pull of its start (as Adam corrects its moments)."""
    result, mean, left = [], 0.0, 1.0
    for value in losses:
        mean = weight * mean + (1 - weight) * value
        left *= weight
        result.append(mean / (1 - left))
    return result


def _figure(width: float, height: float) -> "Figure":
    # a figure of its own on the Agg canvas: no window system and no state of pyplot is touched
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
