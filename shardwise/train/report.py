"""The summary of a run: a table on the screen, and report.md with numbers and plots."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.table import Table
from rich.text import Text

from shardwise.train import experts, plots, step_memory, tracing
from shardwise.train.baseline import Baseline
from shardwise.train.config import Config
from shardwise.train.folder import PICTURES, PLOTS, REPORT
from shardwise.train.memory_picture import Series, draw
from shardwise.train.metrics import Record
from shardwise.train.packed import Packed
from shardwise.train.process_memory import ProcessMemory
from shardwise.train.progress import duration, size_text
from shardwise.train.publish import publish
from shardwise.train.tracing import Recording


@dataclass(frozen=True)
class Cost:
    """A rank's memory by category and traffic per step by kind: measured and predicted.

    Predictions are empty if they are not possible. `bytes_between` has the least and the most bytes
    of the kinds that depend on values. `process` is the memory of the rank's process.
    """

    memory: dict[str, int]
    predicted_memory: dict[str, int]
    sent: dict[str, int]
    predicted_sent: dict[str, int]
    bytes_between: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    process: ProcessMemory | None = None


@dataclass(frozen=True)
class Summary:
    """A finished run, as rank 0 saw it. `unigram` is in nats per token.

    `costs` has an entry for every rank; `baseline` is the cost of `ddp`; `step` is the memory of
    rank 0 at each moment of a step. `began` is the step after which this process started or
    resumed the run: the speed is that of the steps since then.
    """

    config: Config
    plan: str
    ranks: int
    parameters: int
    packed: Packed
    records: Sequence[Record]
    unigram: float
    peak_flops: float
    costs: Sequence[Cost]
    baseline: Baseline | None = None
    began: int = 0
    sample: str = ""
    recording: Recording | None = None
    step: Sequence[Series] = ()

    @property
    def validation(self) -> float | None:
        """The loss of the last evaluation in nats per token."""
        return next(
            (r.validation for r in reversed(self.records) if r.validation is not None), None
        )

    @property
    def recent(self) -> Sequence[Record]:
        """The records of the steps of this process; all records if it made no step."""
        return [record for record in self.records if record.step > self.began] or self.records

    @property
    def memory(self) -> tuple[int, Cost]:
        """The first of the ranks with the most memory, and its cost."""
        return max(enumerate(self.costs), key=lambda of: sum(of[1].memory.values()))

    @property
    def sent(self) -> tuple[int, Cost]:
        """The first of the ranks that send most, and its cost."""
        return max(enumerate(self.costs), key=lambda of: sum(of[1].sent.values()))

    def bits(self, nats: float) -> float:
        """Nats per token, converted to bits per byte of text."""
        return nats / math.log(2) / self.packed.bytes_per_token


def rows(summary: Summary) -> list[tuple[str, str]]:
    """The table: names and values."""
    records, last = summary.records, summary.records[-1]
    smooth = plots.smooth([record.loss for record in records])[-1]
    found = [
        ("plan", f"{summary.plan} on {ranks_text(summary.ranks)}"),
        ("model", f"{summary.parameters:,} parameters"),
        ("data", _data(summary.packed)),
        ("steps", f"{last.step} of {summary.config.train.steps}, {last.consumed:,} sequences"),
        ("time in steps", duration(sum(record.seconds for record in records))),
        ("training loss", f"{last.loss:.4f} nats a token in the last step, {smooth:.4f} smoothed"),
    ]
    if summary.validation is not None:
        found.append(("validation loss", _loss(summary, summary.validation)))
        share = 1 - summary.validation / summary.unigram
        side = "below" if share > 0 else "above"
        found.append(("", f"{abs(share):.0%} {side} the unigram baseline"))
    speed = median(record.tokens_per_s for record in summary.recent)
    # relative to the final peak, which a step may have raised
    rate = median(r.mfu * (r.peak_flops or summary.peak_flops) for r in summary.recent)
    mfu = rate / summary.peak_flops
    peak = f"{summary.peak_flops / 1e9:,.0f} GFLOP/s"
    found += [
        ("unigram baseline", _loss(summary, summary.unigram)),
        ("speed", f"{speed:,.0f} tokens/s (median)"),
        ("MFU", f"{mfu:.1%} of the {peak} that matrix products reach on this machine, each rank"),
        ("sent in a step", _sent_text(summary)),
        ("held between steps", _memory_text(summary)),
    ]
    if said := _process(summary):
        found.append(("memory of the process", said))
    if summary.recording is not None:
        found.append(("bubble", summary.recording.bubbles))
    return found


def table(summary: Summary) -> Table:
    """The summary for the screen."""
    grid = Table.grid(padding=(0, 3))
    for name, value in rows(summary):
        grid.add_row(Text(name, style="dim"), Text(value))
    return grid


def write(summary: Summary) -> tuple[Path, list[str]]:
    """Draw the plots and write report.md into the run's folder; its path, and what failed.

    A picture or a trace that cannot be made is missing from the report; the rest is made.
    """
    folder = summary.config.folder
    failures = []
    for name, make in _pictures(summary).items():
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            make(folder / name)
        except Exception as error:  # noqa: BLE001  a library may raise anything; the run is saved
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            failures.append(f"{folder / name} could not be made ({why})")
    path = folder / REPORT
    publish(path, lambda beside: beside.write_text(text(summary), encoding="utf-8"))
    return path, failures


def _pictures(summary: Summary) -> dict[str, Callable[[Path], object]]:
    """The files beside the report, and what makes each of them."""
    (holder, held), (sender, sent) = summary.memory, summary.sent
    ddp = summary.baseline or Baseline({}, {})
    memory, traffic = (
        (f"What rank {holder} holds between steps", held.memory, held.predicted_memory, ddp.memory),
        (f"What rank {sender} sends in a step", sent.sent, sent.predicted_sent, ddp.sent),
    )
    loss, between, sends = PICTURES
    found: dict[str, Callable[[Path], object]] = {
        loss: lambda path: plots.loss(path, summary.records, summary.unigram),
        between: lambda path: plots.bars(path, *memory),
        sends: lambda path: plots.bars(path, *traffic),
    }
    if summary.sample:
        found["sample.txt"] = lambda path: path.write_text(summary.sample, encoding="utf-8")
    if summary.step:
        found[f"{PLOTS}/{step_memory.PICTURE}"] = lambda path: draw(path, summary.step)
    if (recording := summary.recording) is not None:
        found[tracing.TRACE] = lambda path: tracing.write(path.parent, recording)
    if experts.sum_loads(summary.records):
        panels = experts.panels(summary.records)
        found[f"{PLOTS}/{experts.PICTURE}"] = lambda path: plots.heat_map(path, panels)
    return found


def text(summary: Summary) -> str:
    """The text of report.md."""
    (holder, held), (sender, sent) = summary.memory, summary.sent
    ddp = summary.baseline or Baseline({}, {})
    lines = [f"# {summary.config.folder.name}", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows(summary)), ""]
    lines += ["## Loss", "", "![loss](plots/loss.png)", "", _baseline_text(summary), ""]
    lines += ["## Memory", "", "![memory](plots/memory.png)", ""]
    lines += [*_bytes_table(holder, held.memory, held.predicted_memory, ddp.memory), ""]
    lines += step_memory.lines(summary.step)
    lines += ["## Bytes", "", "![bytes](plots/bytes.png)", ""]
    lines += [*_bytes_table(sender, sent.sent, sent.predicted_sent, ddp.sent), ""]
    for kind, (least, most) in sent.bytes_between.items():
        lines += [f"{kind} depends on where the tokens go: {least:,} to {most:,} bytes.", ""]
    lines += experts.lines(summary.records)
    lines += tracing.lines(summary.recording)
    if summary.sample:
        quoted = "\n".join(f"    {line}" for line in summary.sample.splitlines())
        lines += ["## Sample", "", quoted, ""]
    return "\n".join(lines)


def ranks_text(ranks: int) -> str:
    """1 -> '1 rank', 2 -> '2 ranks'."""
    return f"{ranks} rank{'s' * (ranks > 1)}"


def _baseline_text(summary: Summary) -> str:
    return (
        f"The baseline ({summary.unigram:.4f} nats a token) is the entropy of the validation "
        "tokens' own frequencies: the best loss of a model that ignores the previous tokens."
    )


def _bytes_table(
    rank: int, measured: dict[str, int], predicted: dict[str, int], ddp: dict[str, int]
) -> list[str]:
    """A table of bytes, with a column for `ddp` on the same ranks if the plan is another."""
    if not {**measured, **predicted}:
        return ["No bytes: there is no other rank."]
    series = {"measured": measured, "formula": predicted}
    series |= {"ddp on the same ranks": ddp} if ddp else {}
    lines = [f"| rank {rank}, bytes | {' | '.join(series)} |", "|---" * (1 + len(series)) + "|"]
    for name in dict.fromkeys(name for sizes in series.values() for name in sizes):
        row = (f"{sizes[name]:,}" if name in sizes else "-" for sizes in series.values())
        lines.append(f"| {name} | {' | '.join(row)} |")
    totals = (f"{sum(sizes.values()):,}" for sizes in series.values())
    return [*lines, f"| {plots.TOTAL} | {' | '.join(totals)} |"]


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


def _process(summary: Summary) -> str:
    """The largest process; "" if none is measured."""
    every = [(of.process, rank) for rank, of in enumerate(summary.costs) if of.process is not None]
    if not every:
        return ""
    most, rank = max(every, key=lambda of: of[0].peak_bytes)
    of_rank = f"rank {rank}, the most of any rank" if len(every) > 1 else "the rank"
    said = f"{size_text(most.peak_bytes)} at its peak, by {of_rank}"
    if not most.predicted_bytes:
        return said
    own = most.predicted_bytes - most.before_bytes
    return (
        f"{said}; predicted {size_text(most.predicted_bytes)}: {size_text(most.before_bytes)} "
        f"before the model was made, {size_text(own)} of the model and a step"
    )


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
