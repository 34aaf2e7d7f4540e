"""The contents of a run's report: each number, sentence and picture, once for all forms."""

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.table import Table as Grid
from rich.text import Text

from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import schedule_of
from shardwise.core.plan.plan_parser import word_of
from shardwise.core.schedule import draw
from shardwise.core.schedule.clock import clock
from shardwise.derive.search.result import parts_of
from shardwise.train import metrics
from shardwise.train.data.packed import Packed
from shardwise.train.metrics import Record
from shardwise.train.progress import duration, ranks_text, size_text, unit_of
from shardwise.train.run_folder import PICTURES, PLOTS
from shardwise.train.summary import Summary, TimeCost, all_agree, milliseconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURED, PREDICTED, TOTAL = "measured", "predicted", "total"
STEP_TIME: Final = "step_time.json"
MOST_ACTIONS: Final = 4096  # of a schedule that is drawn


class ReportTable(NamedTuple):
    """The cells of a table as text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A part of a report. `draw` makes the SVG of `picture`. Text in `backquotes` is code."""

    title: str
    sentences: Sequence[str] = ()
    table: ReportTable | None = None
    picture: str = ""
    draw: Callable[[], str] | None = None


class Check(NamedTuple):
    """Whether a measurement equals the prediction; None if unknown. `said` overrides the words."""

    name: str
    agrees: bool | None
    said: str = ""

    def __str__(self) -> str:
        words = {True: "as predicted", False: "not as predicted", None: "not predicted"}
        mark = {True: "✓ ", False: "✗ ", None: ""}[self.agrees]
        return f"{mark}{self.name}: {self.said or words[self.agrees]}"


@dataclass(frozen=True)
class ReportContents:
    """All that a report says: `rows` of the run's table, the text of further `files` by name."""

    title: str
    headline: str
    checks: Sequence[Check]
    rows: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    files: Mapping[str, Callable[[], str]] = field(default_factory=dict[str, Callable[[], str]])


def contents_of(summary: Summary) -> ReportContents:
    """The report of a run."""
    plan, smoothed = Plan.parse(summary.plan), smooth([record.loss for record in summary.records])
    timed = summary.time
    found = [
        _loss_section(summary, smoothed),
        _memory(summary),
        _bytes(summary),
        None if timed is None else _time_section(timed),
        _schedule(plan),
        _experts(summary),
        _plan(plan),
    ]
    return ReportContents(
        title=summary.config.folder.name,
        headline=_headline(summary, smoothed[-1]),
        checks=_checks(summary),
        rows=_rows(summary, smoothed[-1]),
        sections=[section for section in found if section is not None],
        files={} if timed is None else {STEP_TIME: lambda: json.dumps(timed.as_json(), indent=2)},
    )


def table(contents: ReportContents) -> Grid:
    grid = Grid.grid(padding=(0, 3))
    for name, value in contents.rows:
        grid.add_row(Text(name, style="dim"), Text(value))
    return grid


def _rows(summary: Summary, smoothed: float) -> list[tuple[str, str]]:
    last = summary.records[-1]
    worlds = _worlds(summary)
    changed = ", ".join(f"{n} ranks after step {step}" for step, n in worlds)
    found = [
        ("plan", f"{summary.plan} on {ranks_text(summary.ranks)}"),
        ("model", f"{summary.parameters:,} parameters"),
        ("data", _data(summary.packed)),
        *([("world", f"it changed: {changed}")] if worlds else []),
        ("steps", f"{last.step} of {summary.config.train.steps}, {last.consumed:,} sequences"),
        ("time in steps", duration(summary.seconds)),
        (
            "training loss",
            f"{last.loss:.4f} nats a token in the last step, {smoothed:.4f} smoothed",
        ),
    ]
    if summary.validation is not None:
        found.append(("validation loss", _loss(summary, summary.validation)))
        found.append(("", _distance(summary.validation, summary.unigram)))
    found += [
        ("unigram baseline", _loss(summary, summary.unigram)),
        ("speed", f"{summary.speed:,.0f} tokens/s (median)"),
        *([] if summary.mfu is None else [("MFU", f"{summary.mfu:.1%} of the device's peak")]),
        ("sent in a step", _sent_text(summary)),
        ("held between steps", _memory_text(summary)),
    ]
    if summary.time is not None:
        found.append(("time of a step", summary.time.text))
    peaks = [cost.peak_bytes for cost in summary.costs]
    whose = _whose(peaks.index(max(peaks)), peaks)
    found.append(("memory of the process", f"{size_text(max(peaks))} at its peak, by {whose}"))
    found.append(("checkpoints", summary.saves.text()))
    if summary.best:
        found.append(("best checkpoint", f"{summary.best}, by the validation loss"))
    return found


def _headline(summary: Summary, smoothed: float) -> str:
    """The loss, beside the loss of a model that learned nothing."""
    if summary.validation is None:
        return f"Training loss {smoothed:.3f} nats a token"
    far = _distance(summary.validation, summary.unigram)
    return f"Validation loss {summary.validation:.3f} nats a token, {far}"


def _distance(loss: float, baseline: float) -> str:
    share = 1 - loss / baseline
    return f"{abs(share):.0%} {'below' if share > 0 else 'above'} the unigram baseline"


def _checks(summary: Summary) -> list[Check]:
    """Measured against predicted; bytes only if there are other ranks."""
    sent = Check("bytes sent", all_agree(cost.sent_agrees for cost in summary.costs))
    time = summary.time
    said = "" if time is None else f"{time.ratio - 1:+.1%} predicted over measured"
    return [
        Check("memory between steps", all_agree(cost.memory_agrees for cost in summary.costs)),
        *[sent] * (summary.ranks > 1),
        *([] if time is None else [Check("time of a step", None, said)]),
    ]


def _worlds(summary: Summary) -> list[tuple[int, int]]:
    """The steps after which the number of ranks changed, and the new numbers."""
    counts = [(record.step, record.ranks) for record in summary.records if record.ranks is not None]
    return [(a[0], b[1]) for a, b in pairwise(counts) if a[1] != b[1]]


def _loss_section(summary: Summary, smoothed: Sequence[float]) -> Section:
    said = (
        f"The baseline ({summary.unigram:.4f} nats a token) is the entropy of the validation "
        "tokens' own frequencies: the best loss of a model that ignores the previous tokens."
    )
    return Section(
        "Loss",
        [said],
        picture=PICTURES[0],
        draw=lambda: loss(summary.records, smoothed, summary.unigram, _worlds(summary)),
    )


def _memory(summary: Summary) -> Section:
    rank, cost = summary.memory
    series = _with_sums(cost.memory, cost.predicted_memory)
    return Section(
        "Memory",
        table=_bytes_table(rank, series),
        picture=PICTURES[1],
        draw=lambda: bars(f"What rank {rank} holds between steps", series),
    )


def _bytes(summary: Summary) -> Section:
    rank, cost = summary.sent
    series = _with_sums(cost.sent, cost.predicted_sent)
    if not _names(series):
        return Section("Bytes", ["No bytes: there is no other rank."])
    said = [f"{kind} depends on where the tokens go." for kind in cost.routed]
    return Section(
        "Bytes",
        ["Each row is an axis of the plan and an operation of its ranks.", *said],
        _bytes_table(rank, series),
        PICTURES[2],
        lambda: bars(f"What rank {rank} sends in a step", series),
    )


Series = Mapping[str, Mapping[str, int]]  # bytes by name, measured and predicted


def _names(series: Series) -> list[str]:
    names = dict.fromkeys(name for sizes in series.values() for name in sizes)
    return sorted(names, key=lambda name: name == TOTAL)


def _with_sums(measured: dict[str, int], predicted: dict[str, int]) -> Series:
    series = {MEASURED: measured, PREDICTED: predicted}
    if len(_names(series)) < 2:
        return series
    return {label: sizes | {TOTAL: sum(sizes.values())} for label, sizes in series.items()}


def _bytes_table(rank: int, series: Series) -> ReportTable:
    cells = [
        [name, *(f"{sizes[name]:,}" if name in sizes else "-" for sizes in series.values())]
        for name in _names(series)
    ]
    return ReportTable([f"rank {rank}, bytes", *series], cells)


def _time_section(time: TimeCost) -> Section:
    times = {PREDICTED: time.predicted.seconds, MEASURED: time.measured_s}
    rows = [[name, milliseconds(s)] for name, s in (parts_of(time.predicted) | times).items()]
    said = [f"{time.text}. `{STEP_TIME}` has the numbers."]
    if time.predicted.unmodelled:
        said += [f"The time of {', '.join(time.predicted.unmodelled)} is not predicted."]
    return Section("Time", said, ReportTable(["part of a step", "ms"], rows))


def _schedule(plan: Plan) -> Section | None:
    schedule = schedule_of(plan)
    if schedule is None:
        return None
    timeline = clock(schedule)
    said = (
        f"The schedule `{plan.pipeline}` if F, I and W take the same time: its bubble is "
        f"{timeline.bubble:.1%}. `--set run.profile=true` records what the ranks do."
    )
    if sum(map(len, timeline.spans)) > MOST_ACTIONS:
        return Section("Timeline", [said])
    title = f"{plan.pipeline} on {schedule.ranks} ranks"
    return Section(
        "Timeline", [said], picture="timeline.svg", draw=lambda: svg(draw.figure(timeline, title))
    )


def _experts(summary: Summary) -> Section | None:
    tenth = max(1, len(summary.records) // 10)
    first = metrics.sum_loads(summary.records[:tenth])
    last = metrics.sum_loads(summary.records[-tenth:])
    if not last:
        return None
    text = (
        f"The busiest expert of a layer has {metrics.busiest(first):.2f} times the mean in the "
        f"first tenth of the steps, and {metrics.busiest(last):.2f} times in the last."
    )
    loads = {"first": metrics.relative_loads(first), "last": metrics.relative_loads(last)}
    return Section("Experts", [text], picture=f"{PLOTS}/experts.svg", draw=lambda: heat_maps(loads))


def _plan(plan: Plan) -> Section:
    words = [("", word) for word in plan.words.split()]
    words += [("", plan.row)] * (plan.row not in plan.words.split())
    words += [(",".join(of.patterns), word) for of in plan.layers for word in of.words.split()]
    rows = []
    for layers, word in words:
        known = word_of(word)
        meaning = "" if known is None else f"`{known.form}`: {known.said_of(word)}"
        rows.append([f"`{word}`", f"{meaning}{f' (only layers {layers})' if layers else ''}"])
    return Section("Plan", [f"`{plan}`"], ReportTable(["word", "meaning"], rows))


def smooth(losses: Sequence[float], weight: float = 0.9) -> list[float]:
    """The exponential moving mean of the finite losses, with Adam's bias correction."""
    result, mean, left = [], 0.0, 1.0
    for value in losses:
        if not math.isfinite(value):
            result.append(result[-1] if result else math.nan)
            continue
        mean = weight * mean + (1 - weight) * value
        left *= weight
        result.append(mean / (1 - left))
    return result


def _sent_text(summary: Summary) -> str:
    rank, cost = summary.sent
    if summary.ranks == 1:
        return "nothing: there is one rank"
    whose = _whose(rank, [sum(of.sent.values()) for of in summary.costs])
    exchanged = "".join(
        f", and {size_text(cost.sent.get(kind, 0))} of {kind}, which depends on the routing"
        for kind in cost.routed
    )
    return f"{_compared_text(cost.sent, cost.predicted_sent)} by {whose}{exchanged}"


def _memory_text(summary: Summary) -> str:
    rank, cost = summary.memory
    whose = _whose(rank, [sum(of.memory.values()) for of in summary.costs])
    return f"{_compared_text(cost.memory, cost.predicted_memory)} by {whose}"


def _whose(rank: int, totals: Sequence[int]) -> str:
    return f"rank {rank}, the most of any rank" if len(set(totals)) > 1 else "each rank"


def _compared_text(measured: dict[str, int], predicted: dict[str, int]) -> str:
    """The sum over the categories that both have, compared with the prediction."""
    names = [name for name in measured if name in predicted]
    ours, theirs = (sum(sizes[name] for name in names) for sizes in (measured, predicted))
    if not names:
        return size_text(sum(measured.values()))
    said = "as predicted" if ours == theirs else f"predicted {size_text(theirs)}, {theirs:,} bytes"
    return f"{size_text(ours)} ({ours:,} bytes, {said})"


def _data(packed: Packed) -> str:
    tokens = f"{len(packed.stream):,} tokens"
    documents = f"{packed.documents:,} document{'s' * (packed.documents > 1)}"
    return f"{tokens}, {documents}, {size_text(packed.text_bytes)} of text"


def _loss(summary: Summary, nats: float) -> str:
    return f"{nats:.4f} nats a token, {summary.bits(nats):.3f} bits a byte"


# --- the plots of a run as SVG --------------------------------------------------------------------

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


def bars(title: str, series: Series) -> str:
    """A group of bars for each name, all in one unit."""
    names = _names(series)
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
