"""The report of a run: report.md with its pictures, and report.html, which loads no other file."""

import io
import json
import math
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from markdown_it import MarkdownIt

from shardwise.checkpoint.folder import write_file
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import schedule_of
from shardwise.core.plan.plan_parser import word_of
from shardwise.core.schedule import draw
from shardwise.core.schedule.clock import clock
from shardwise.train import metrics
from shardwise.train.progress import duration, ranks_text, size_text, unit_of
from shardwise.train.run_folder import PAGE, PLOTS, REPORT
from shardwise.train.summary import Summary, TimeCost, milliseconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURED, PREDICTED, TOTAL = "measured", "predicted", "total"
STEP_TIME: Final = "step_time.json"
MOST_ACTIONS: Final = 4096  # of a schedule that is drawn
#: What stands before the text of the page.
HEAD: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ max-width: 60rem; margin: 0 auto; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; }}
img {{ max-width: 100%; background: #fff; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
th, td {{ text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #8886; }}
</style>
"""


class Section(NamedTuple):
    """The paragraphs of a part of a report, in Markdown; `draw` makes the SVG of `picture`."""

    title: str
    paragraphs: Sequence[str]
    picture: str = ""
    draw: Callable[[], str] | None = None

    def __str__(self) -> str:
        picture = [f"![{Path(self.picture).stem}]({self.picture})"] if self.picture else []
        return "\n\n".join([f"## {self.title}", *picture, *self.paragraphs])


@dataclass(frozen=True)
class RunReport:
    """The `rows` of the run's table, the text of report.md, and what makes each further file."""

    rows: Sequence[tuple[str, str]]
    text: str
    files: Mapping[str, Callable[[], str]]


def report_of(summary: Summary) -> RunReport:
    """The report of a run."""
    plan, smoothed = Plan.parse(summary.plan), smooth([record.loss for record in summary.records])
    rows, timed = _rows(summary, smoothed[-1]), summary.time
    sections = [
        _loss_section(summary, smoothed),
        _memory(summary),
        _bytes(summary),
        None if timed is None else _time_section(timed),
        _schedule(plan),
        _experts(summary),
        _plan(plan),
    ]
    made = [section for section in sections if section is not None]
    head = [f"# {summary.config.folder.name}", f"**{_headline(summary, smoothed[-1])}**"]
    text = [*head, _checks(summary), _table(["", ""], rows), *map(str, made)]
    files = {section.picture: section.draw for section in made if section.draw is not None}
    if timed is not None:
        files[STEP_TIME] = lambda: json.dumps(timed.as_json(), indent=2)
    return RunReport(rows, "\n\n".join(text) + "\n", files)


def write(report: RunReport, folder: Path) -> list[str]:
    """Write the report into the run's folder; returns a sentence for each file that failed."""
    failures = []
    for name, make in {**report.files, PAGE: lambda: page(report.text, folder)}.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, make)
        except Exception as error:  # noqa: BLE001  a library may raise anything; the run is saved
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            failures.append(f"{path} could not be made ({why})")
    _write(folder / REPORT, lambda: report.text)
    return failures


def _write(path: Path, make: Callable[[], str]) -> None:
    write_file(path, lambda beside: beside.write_text(make(), encoding="utf-8"))


def page(text: str, folder: Path) -> str:
    """The text of report.html: that of report.md, with the pictures in `folder` inside."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub(r'<img src="([^"]*)" alt="([^"]*)" />', partial(_picture, folder), body)
    return HEAD.format(title=escape(folder.name)) + body


def _picture(folder: Path, image: re.Match[str]) -> str:
    file = folder / image[1]
    data = b64encode(file.read_bytes()).decode() if file.is_file() else ""
    return f'<img alt="{image[2]}" src="data:image/svg+xml;base64,{data}">' if data else ""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rows(summary: Summary, smoothed: float) -> list[tuple[str, str]]:
    last, packed, validation = summary.records[-1], summary.packed, summary.validation
    changed = ", ".join(f"{n} ranks after step {step}" for step, n in _worlds(summary))
    documents = f"{packed.documents:,} document{'s' * (packed.documents > 1)}"
    rank, by = _most([cost.memory for cost in summary.costs])
    held, peaks = summary.costs[rank], [{"": cost.peak_bytes} for cost in summary.costs]
    memory = f"{_compared_text(held.memory, held.predicted_memory)} by {by}"
    rank, whose = _most(peaks)
    peak = f"{size_text(peaks[rank][''])} at its peak, by {whose}"
    tokens = f"{len(packed.stream):,} tokens, {documents}, {size_text(packed.text_bytes)} of text"
    training = f"{last.loss:.4f} nats a token in the last step, {smoothed:.4f} smoothed"
    mfu = f"{summary.mfu:.1%} of the device's peak" if summary.mfu is not None else ""
    distance = "" if validation is None else _distance(validation, summary.unigram)
    found = [
        ("plan", f"{summary.plan} on {ranks_text(summary.ranks)}"),
        ("model", f"{summary.parameters:,} parameters"),
        ("data", tokens),
        ("world", f"it changed: {changed}" if changed else ""),
        ("steps", f"{last.step} of {summary.config.train.steps}, {last.consumed:,} sequences"),
        ("time in steps", duration(summary.seconds)),
        ("training loss", training),
        ("validation loss", "" if validation is None else _loss(summary, validation)),
        ("", distance),
        ("unigram baseline", _loss(summary, summary.unigram)),
        ("speed", f"{summary.speed:,.0f} tokens/s (median)"),
        ("MFU", mfu),
        ("sent in a step", _sent_text(summary)),
        ("held between steps", memory),
        ("time of a step", "" if summary.time is None else summary.time.text),
        ("memory of the process", peak),
        ("checkpoints", summary.saves.text()),
        ("best checkpoint", summary.best and f"{summary.best}, by the validation loss"),
    ]
    return [(name, said) for name, said in found if said]


def _headline(summary: Summary, smoothed: float) -> str:
    if summary.validation is None:
        return f"Training loss {smoothed:.3f} nats a token"
    far = _distance(summary.validation, summary.unigram)
    return f"Validation loss {summary.validation:.3f} nats a token, {far}"


def _distance(loss: float, baseline: float) -> str:
    share = 1 - loss / baseline
    return f"{abs(share):.0%} {'below' if share > 0 else 'above'} the unigram baseline"


def _checks(summary: Summary) -> str:
    """Whether measurements are as predicted on all ranks; bytes only if there are other ranks."""
    lines = [
        _check("memory between steps", [(c.memory, c.predicted_memory) for c in summary.costs])
    ]
    if summary.ranks > 1:
        lines += [_check("bytes sent", [(c.sent, c.predicted_sent) for c in summary.costs])]
    if summary.time is not None:
        lines += [f"time of a step: {summary.time.ratio - 1:+.1%} predicted over measured"]
    return "\n".join(f"- {line}" for line in lines)


def _check(name: str, pairs: Iterable[tuple[dict[str, int], dict[str, int]]]) -> str:
    same = [here[kind] == there[kind] for here, there in pairs for kind in here.keys() & there]
    if not same:
        return f"{name}: not predicted"
    return f"✓ {name}: as predicted" if all(same) else f"✗ {name}: not as predicted"


def _worlds(summary: Summary) -> list[tuple[int, int]]:
    """The steps after which the number of ranks changed, and the new numbers."""
    counts = [(record.step, record.ranks) for record in summary.records if record.ranks is not None]
    return [(a[0], b[1]) for a, b in pairwise(counts) if a[1] != b[1]]


def _loss_section(summary: Summary, smoothed: Sequence[float]) -> Section:
    said = (
        f"The baseline ({summary.unigram:.4f} nats a token) is the entropy of the validation "
        "tokens' own frequencies: the best loss of a model that ignores the previous tokens."
    )
    return Section("Loss", [said], f"{PLOTS}/loss.svg", lambda: loss(summary, smoothed))


def _memory(summary: Summary) -> Section:
    rank, _ = _most([cost.memory for cost in summary.costs])
    cost = summary.costs[rank]
    series = _with_sums(cost.memory, cost.predicted_memory)
    title, picture = f"What rank {rank} holds between steps", f"{PLOTS}/memory.svg"
    return Section("Memory", [_bytes_table(rank, series)], picture, lambda: bars(title, series))


def _bytes(summary: Summary) -> Section:
    rank, _ = _most([cost.sent for cost in summary.costs])
    cost = summary.costs[rank]
    series = _with_sums(cost.sent, cost.predicted_sent)
    if not _names(series):
        return Section("Bytes", ["No bytes: there is no other rank."])
    said = ["Each row is an axis of the plan and an operation of its ranks."]
    said += [f"{kind} depends on where the tokens go." for kind in cost.routed]
    title, said = f"What rank {rank} sends in a step", [*said, _bytes_table(rank, series)]
    return Section("Bytes", said, f"{PLOTS}/bytes.svg", lambda: bars(title, series))


Series = Mapping[str, Mapping[str, int]]  # bytes by name, measured and predicted


def _names(series: Series) -> list[str]:
    names = dict.fromkeys(name for sizes in series.values() for name in sizes)
    return sorted(names, key=lambda name: name == TOTAL)


def _with_sums(measured: dict[str, int], predicted: dict[str, int]) -> Series:
    series = {MEASURED: measured, PREDICTED: predicted}
    if len(_names(series)) < 2:
        return series
    return {label: sizes | {TOTAL: sum(sizes.values())} for label, sizes in series.items()}


def _bytes_table(rank: int, series: Series) -> str:
    cells = [
        [name, *(f"{sizes[name]:,}" if name in sizes else "-" for sizes in series.values())]
        for name in _names(series)
    ]
    return _table([f"rank {rank}, bytes", *series], cells)


def _time_section(time: TimeCost) -> Section:
    times = {PREDICTED: time.predicted.seconds, MEASURED: time.measured_s}
    rows = [[name, milliseconds(s)] for name, s in (time.predicted.parts | times).items()]
    said = [f"{time.text}. `{STEP_TIME}` has the numbers."]
    if time.predicted.unmodelled:
        said += [f"The time of {', '.join(time.predicted.unmodelled)} is not predicted."]
    return Section("Time", [*said, _table(["part of a step", "ms"], rows)])


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
    return Section("Timeline", [said], "timeline.svg", lambda: svg(draw.figure(timeline, title)))


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
    return Section("Experts", [text], f"{PLOTS}/experts.svg", lambda: heat_maps(loads))


def _plan(plan: Plan) -> Section:
    words = [("", word) for word in plan.words.split()]
    words += [("", plan.row)] * (plan.row not in plan.words.split())
    words += [(",".join(of.patterns), word) for of in plan.layers for word in of.words.split()]
    rows = []
    for layers, word in words:
        known = word_of(word)
        meaning = "" if known is None else f"`{known.form}`: {known.said_of(word)}"
        rows.append([f"`{word}`", f"{meaning}{f' (only layers {layers})' if layers else ''}"])
    return Section("Plan", [f"`{plan}`", _table(["word", "meaning"], rows)])


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
    if summary.ranks == 1:
        return "nothing: there is one rank"
    rank, whose = _most([cost.sent for cost in summary.costs])
    cost = summary.costs[rank]
    exchanged = "".join(
        f", and {size_text(cost.sent.get(kind, 0))} of {kind}, which depends on the routing"
        for kind in cost.routed
    )
    return f"{_compared_text(cost.sent, cost.predicted_sent)} by {whose}{exchanged}"


def _most(sizes: Iterable[Mapping[str, int]]) -> tuple[int, str]:
    totals = [sum(each.values()) for each in sizes]
    rank = totals.index(max(totals))
    return rank, f"rank {rank}, the most of any rank" if len({*totals}) > 1 else "each rank"


def _compared_text(measured: dict[str, int], predicted: dict[str, int]) -> str:
    """The sum over the categories that both have, compared with the prediction."""
    names = [name for name in measured if name in predicted]
    ours, theirs = (sum(sizes[name] for name in names) for sizes in (measured, predicted))
    if not names:
        return size_text(sum(measured.values()))
    said = "as predicted" if ours == theirs else f"predicted {size_text(theirs)}, {theirs:,} bytes"
    return f"{size_text(ours)} ({ours:,} bytes, {said})"


def _loss(summary: Summary, nats: float) -> str:
    return f"{nats:.4f} nats a token, {summary.bits(nats):.3f} bits a byte"


# --- the plots of a run as SVG --------------------------------------------------------------------

COLOURS = ("#2a6f97", "#f4a259")  # measured, predicted
MOST_NUMBERS = 16  # experts of a layer whose loads are written too


def loss(summary: Summary, smoothed: Sequence[float]) -> str:
    """Training loss (each step, and smoothed), validation loss, and the unigram baseline."""
    figure, records, baseline = new_figure(8, 4.5), summary.records, summary.unigram
    axes, (blue, orange) = figure.subplots(), COLOURS
    steps, losses = [r.step for r in records], [r.loss for r in records]
    axes.plot(steps, losses, color=blue, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smoothed, color=blue, label="training, smoothed")
    evaluated = [(r.step, r.validation) for r in records if r.validation is not None]
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", color=orange, label="validation")
    axes.axhline(baseline, color="grey", linestyle="--", label=f"unigram baseline {baseline:.2f}")
    for step, ranks in _worlds(summary):
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
