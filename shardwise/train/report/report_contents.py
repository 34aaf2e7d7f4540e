"""What the report of a run says: each number and figure is made here, once."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from rich.table import Table as Grid
from rich.text import Text

from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_parser import word_of
from shardwise.train.data.packed import Packed
from shardwise.train.measure import experts, profiling, run_costs
from shardwise.train.measure.progress import duration, ranks_text, size_text
from shardwise.train.report.section import (
    MEASURED,
    PREDICTED,
    TOTAL,
    Bars,
    Card,
    Check,
    Curve,
    ReportContents,
    ReportTable,
    Section,
)
from shardwise.train.report.summary import Summary, all_agree
from shardwise.train.run_folder import PICTURES


def contents_of(summary: Summary) -> ReportContents:
    """The report of a run."""
    plan, curve = Plan.parse(summary.plan), _curve(summary)
    timed = summary.time
    found = [
        Section("Loss", curve, PICTURES[0], [_baseline_text(summary)]),
        _memory(summary),
        _bytes(summary),
        None if timed is None else timed.section(),
        profiling.section(plan),
        experts.section(summary.records),
        _plan(plan),
    ]
    files: dict[str, Callable[[], str]] = {}
    if timed is not None:
        files[run_costs.STEP_TIME] = timed.json
    last, steps = summary.records[-1], summary.config.train.steps
    return ReportContents(
        title=summary.config.folder.name,
        about=f"{summary.plan} on {ranks_text(summary.ranks)}, step {last.step} of {steps}",
        headline=_headline(summary, curve),
        checks=_checks(summary),
        cards=_cards(summary, curve),
        rows=_rows(summary, curve),
        sections=[section for section in found if section is not None],
        files=files,
    )


def table(contents: ReportContents) -> Grid:
    """The table of the run, for the screen."""
    grid = Grid.grid(padding=(0, 3))
    for name, value in contents.rows:
        grid.add_row(Text(name, style="dim"), Text(value))
    return grid


def _rows(summary: Summary, curve: Curve) -> list[tuple[str, str]]:
    """The table of the run: names and values."""
    last = summary.records[-1]
    smooth = f"{last.loss:.4f} nats a token in the last step, {curve.smoothed[-1]:.4f} smoothed"
    found = [
        ("plan", f"{summary.plan} on {ranks_text(summary.ranks)}"),
        ("model", f"{summary.parameters:,} parameters"),
        ("data", _data(summary.packed)),
        *([("world", _worlds(curve))] if curve.worlds else []),
        ("steps", f"{last.step} of {summary.config.train.steps}, {last.consumed:,} sequences"),
        ("time in steps", duration(summary.seconds)),
        ("training loss", smooth),
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


def _worlds(curve: Curve) -> str:
    """When the number of ranks changed, in a run that went on with fewer or more of them."""
    return "it changed: " + ", ".join(f"{n} ranks after step {step}" for step, n in curve.worlds)


def _headline(summary: Summary, curve: Curve) -> str:
    """The answer in a sentence: the loss, beside that of a model that learned nothing."""
    if summary.validation is None:
        return f"Training loss {curve.smoothed[-1]:.3f} nats a token"
    far = _distance(summary.validation, summary.unigram)
    return f"Validation loss {summary.validation:.3f} nats a token, {far}"


def _distance(loss: float, baseline: float) -> str:
    share = 1 - loss / baseline
    return f"{abs(share):.0%} {'below' if share > 0 else 'above'} the unigram baseline"


def _checks(summary: Summary) -> list[Check]:
    """What was measured, compared with what was predicted; bytes only if there are other ranks."""
    sent = Check("bytes sent", all_agree(cost.sent_agrees for cost in summary.costs))
    return [
        Check("memory between steps", all_agree(cost.memory_agrees for cost in summary.costs)),
        *[sent] * (summary.ranks > 1),
        *([] if summary.time is None else [summary.time.check()]),
    ]


def _cards(summary: Summary, curve: Curve) -> list[Card]:
    """The key figures."""
    last, (holder, held), (sender, sent) = summary.records[-1], summary.memory, summary.sent
    holds = _whose(holder, [sum(of.memory.values()) for of in summary.costs])
    sends = _whose(sender, [sum(of.sent.values()) for of in summary.costs])
    steps = f"{last.step} of {summary.config.train.steps} steps"
    of = summary.parameters
    count = f"{of / 1e6:,.1f} M" if of >= 1e6 else f"{of:,}"
    mfu = "" if summary.mfu is None else f", MFU {summary.mfu:.1%}"
    loss = Card("training loss", f"{curve.smoothed[-1]:.3f}", "nats a token, smoothed")
    if summary.validation is not None:
        bits = f"nats a token, {summary.bits(summary.validation):.3f} bits a byte"
        loss = Card("validation loss", f"{summary.validation:.3f}", bits)
    return [
        loss,
        Card("speed", f"{summary.speed:,.0f}", f"tokens/s{mfu}"),
        Card("time in steps", duration(summary.seconds), steps),
        Card("parameters", count, f"on {ranks_text(summary.ranks)}"),
        Card("held", size_text(sum(held.memory.values())), f"between steps, by {holds}"),
        Card("sent", size_text(sum(sent.sent.values())), f"in a step, by {sends}"),
    ]


def _curve(summary: Summary) -> Curve:
    records = summary.records
    losses = [record.loss for record in records]
    evaluated = [(r.step, r.validation) for r in records if r.validation is not None]
    steps = [record.step for record in records]
    counts = [(record.step, record.ranks) for record in records if record.ranks is not None]
    worlds = [(a[0], b[1]) for a, b in pairwise(counts) if a[1] != b[1]]
    return Curve(steps, losses, smooth(losses), evaluated, summary.unigram, worlds)


def _memory(summary: Summary) -> Section:
    rank, cost = summary.memory
    title = f"What rank {rank} holds between steps"
    bars = _bars(title, cost.memory, cost.predicted_memory)
    return Section("Memory", bars, PICTURES[1], table=_bytes_table(rank, bars))


def _bytes(summary: Summary) -> Section:
    rank, cost = summary.sent
    bars = _bars(f"What rank {rank} sends in a step", cost.sent, cost.predicted_sent)
    if not bars.names:
        none = ["No bytes: there is no other rank."]
        return Section("Bytes", bars, PICTURES[2], none)
    said = [
        f"{kind} depends on where the tokens go: {least:,} to {most:,} bytes."
        for kind, (least, most) in cost.bytes_between.items()
    ]
    axes = "Each row is an axis of the plan and an operation of its ranks."
    return Section("Bytes", bars, PICTURES[2], [axes, *said], _bytes_table(rank, bars))


def _bars(title: str, measured: dict[str, int], predicted: dict[str, int]) -> Bars:
    """Measured and predicted bytes, with their sums if there are several."""
    series = {MEASURED: measured, PREDICTED: predicted}
    if len({name for sizes in series.values() for name in sizes}) > 1:
        series = {label: sizes | {TOTAL: sum(sizes.values())} for label, sizes in series.items()}
    return Bars(title, series)


def _bytes_table(rank: int, bars: Bars) -> ReportTable:
    """The bytes of each bar."""
    rows = [
        [name, *(f"{sizes[name]:,}" if name in sizes else "-" for sizes in bars.series.values())]
        for name in bars.names
    ]
    return ReportTable([f"rank {rank}, bytes", *bars.series], rows)


def _plan(plan: Plan) -> Section:
    """Each word of the plan, and what it does."""
    words = [("", word) for word in plan.words.split()]
    words += [("", plan.row)] * (plan.row not in plan.words.split())
    words += [(",".join(of.patterns), word) for of in plan.layers for word in of.words.split()]
    rows = []
    for layers, word in words:
        known = word_of(word)
        meaning = "" if known is None else f"`{known.form}`: {known.said_of(word)}"
        rows.append([f"`{word}`", f"{meaning}{f' (only layers {layers})' if layers else ''}"])
    return Section("Plan", sentences=[f"`{plan}`"], table=ReportTable(["word", "meaning"], rows))


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


def _baseline_text(summary: Summary) -> str:
    return (
        f"The baseline ({summary.unigram:.4f} nats a token) is the entropy of the validation "
        "tokens' own frequencies: the best loss of a model that ignores the previous tokens."
    )


def _sent_text(summary: Summary) -> str:
    rank, cost = summary.sent
    if summary.ranks == 1:
        return "nothing: there is one rank"
    whose = _whose(rank, [sum(of.sent.values()) for of in summary.costs])
    exchanged = "".join(
        f", and {size_text(cost.sent.get(kind, 0))} of {kind}, which depends on the routing"
        for kind in cost.bytes_between
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
