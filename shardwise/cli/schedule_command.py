"""`shardwise schedule`: draws a pipeline schedule and prices it."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shardwise.cli.configured import CONFIG, JSON, configured
from shardwise.core.errors import bad
from shardwise.core.schedule import draw
from shardwise.core.schedule.clock import ActionCosts, Timeline, clock
from shardwise.core.schedule.library import Entry, Size, entry, size, written
from shardwise.core.schedule.lower import peaks, versions
from shardwise.core.schedule.schedule import Schedule


def schedule_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="1f1b, or 1f1b:8 as in a plan.")
    ] = None,
    *,
    stages: Annotated[int | None, typer.Option(help="Ranks of the pipeline; 4 if not given.")] = (
        None
    ),
    microbatches: Annotated[int | None, typer.Option(help="Per batch; 8 if not given.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Virtual stages per rank.")] = None,
    batches: Annotated[int, typer.Option(help="2bw: batches without a flush.")] = 1,
    costs: Annotated[
        str,
        typer.Option(
            help="Time of each action, and of a message (hop=0.1); F=1/2/1/1 is one for each stage."
        ),
    ] = "F=1,I=1,W=1",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it: a .png or .svg file.")
    ] = None,
    config: Annotated[Path | None, CONFIG] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Draw a pipeline schedule and price it: makespan, bubble, activations, transfers."""
    if config is not None:
        name, stages = _of_run(config, name, stages, microbatches, chunks)
    subject = _subject(name, 4 if stages is None else stages, microbatches, chunks, batches)
    times = read_costs(costs, len(subject.schedule.home))
    timeline = clock(subject.schedule, times)
    if not timeline.makespan:
        given = f"the costs '{costs}', by which no action takes any time"
        raise bad(given, "a time above 0 for an action of the schedule", "--costs F=1,I=1,W=1")
    if out is not None:
        draw.save(draw.figure(timeline, subject.title), out, "--out pipeline.svg")
    numbers = _numbers(subject, timeline, times)
    if as_json:
        typer.echo(json.dumps(numbers))
        return
    typer.echo(f"{subject.title} ({subject.entry.paper})\n\n{draw.as_text(timeline)}\n")
    Console().print(_table(numbers))


@dataclass(frozen=True)
class Subject:
    """The schedule to draw, with its entry in the library and its size."""

    title: str
    schedule: Schedule
    entry: Entry
    size: Size


def read_costs(given: str, stages: int) -> ActionCosts:
    """Parse costs: F=1,I=1,W=1; F=1/2 is 1 on stage 0 and 2 on stage 1; hop=0.1 is a message's."""
    found: dict[str, Any] = {}
    for part in map(str.strip, given.split(",")):
        op, _, text = part.partition("=")
        times = [time for time in map(_time, text.split("/")) if time is not None]
        counts = (1,) if op == "hop" else (1, stages)
        if op not in _OPS or op in found or len(times) != text.count("/") + 1:
            counts = ()
        if len(times) not in counts:
            allowed = f"{', '.join(_OPS)}, each once with {_TIME}, or one for each of "
            allowed += f"{stages} stages"
            raise bad(f"'{part}' in the costs '{given}'", allowed, "--costs F=1,I=1,W=1")
        found[op] = tuple(times) if len(times) > 1 else times[0]
    return ActionCosts(**found)


_OPS = tuple(field.name for field in fields(ActionCosts))
LEAST, MOST = 1e-12, 1e12
_TIME = f"a time of 0, or from {LEAST:g} to {MOST:g}"


def _time(given: str) -> float | None:
    try:
        time = float(given)
    except ValueError:
        return None
    return time if time == 0 or LEAST <= time <= MOST else None


def _subject(
    text: str | None, stages: int, microbatches: int | None, chunks: int | None, batches: int
) -> Subject:
    if text is None:
        raise bad("no schedule", "its name, or the configuration of a run", "1f1b")
    name, _, numbers = text.partition(":")
    found = entry(name)
    m, _, v = numbers.partition("x")
    if numbers and not re.fullmatch("[0-9]{1,18}(x[0-9]{1,18})?", numbers):
        raise bad(f"'{text}'", "a name, or with a colon M or MxV after it", f"{name}:8")
    if numbers and (microbatches or (v and chunks)):
        given = f"'{text}' and its numbers again as options"
        raise bad(given, "one or the other", name)
    usual = (1 if name == "naive" else 8) if microbatches is None else microbatches
    n = size(name, stages, int(m) if numbers else usual, int(v) if v else chunks, batches)
    more = f", {n.v} chunks a rank" * (n.v > 1) + f", {n.batches} batches" * (n.batches > 1)
    title = f"{found.title}: {_count(n.p, 'rank')}, {_count(n.m, 'microbatch', 'es')}{more}"
    return Subject(title, written(name, n), found, n)


def _of_run(config: Path, name: str | None, *sizes: int | None) -> tuple[str, int]:
    """The name and the ranks of a run's schedule, beside which no other may be asked for."""
    plan = configured(config, None, None).plan
    if name is not None or any(sizes) or plan.pipeline is None:
        given = f"whose plan '{plan}' has no pipeline"
        if plan.pipeline is not None:
            given = "beside a schedule's name or sizes"
        raise bad(
            f"--config {config} {given}",
            "the configuration of a run with a pipeline, alone: its plan says name and sizes",
            "shardwise schedule 1f1b --stages 4 --microbatches 8",
        )
    return plan.pipeline, plan.mesh.size_of("pp")


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


def _numbers(subject: Subject, timeline: Timeline, costs: ActionCosts) -> dict[str, Any]:
    schedule = timeline.schedule
    sent = Counter(s.token.kind for row in schedule.rows for s in row if s.op == "SEND")
    return {
        "title": subject.title,
        "ranks": schedule.ranks,
        "stages": len(schedule.home),
        "microbatches": schedule.microbatches,
        "costs": asdict(costs),
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "idle": timeline.idle,
        "activations": peaks(schedule),
        "versions": versions(schedule),
        "transfers": {"act": sent["act"], "grad": sent["grad"]},
        "formula": _formula(subject.entry, subject.size, schedule, costs),
    }


def _formula(found: Entry, n: Size, schedule: Schedule, costs: ActionCosts) -> dict[str, Any]:
    """The closed forms. Times need equal stages, no hop, and F = I = W if there are I and W."""
    f, i, w, b = (costs.of(op, 0) for op in ("F", "I", "W", "B"))
    halves = any(step.op == "I" for row in schedule.rows for step in row)
    equal_costs = ActionCosts(f, i, w, None if costs.B is None else b)
    holds = costs == equal_costs and (not halves or (f == i == w and b == 2 * f))
    return {
        "paper": found.paper,
        "makespan": found.span(n) * (f + b) / 3 if holds else None,
        "bubble": found.bubble(n) if holds else None,
        "activations": found.tapes(n),
        "bubble_text": found.bubble_text,
        "activations_text": found.tapes_text,
        "versions_text": found.versions_text,
    }


def _table(numbers: dict[str, Any]) -> Table:
    form: dict[str, Any] = numbers["formula"]
    table = Table("", "clock", "formula", "", box=None, header_style="dim")

    def row(name: str, show: Callable[[Any], str], text: str = "") -> None:
        said = "-" if form.get(name) is None else show(form[name])
        table.add_row(name, show(numbers[name]), said, text)

    row("makespan", "{:g}".format)
    row("bubble", "{:.2%}".format, form.get("bubble_text", ""))
    row("idle", lambda times: " ".join(f"{time:g}" for time in times), "by rank")
    row(
        "activations",
        lambda held: " ".join(f"{x:g}" for x in held),
        form.get("activations_text", ""),
    )
    if max(numbers["versions"]) > 1:
        row("versions", lambda held: " ".join(map(str, held)), form.get("versions_text", ""))
    row(
        "transfers",
        lambda sent: f"{sum(sent.values())}",
        "{act} act, {grad} grad".format(**numbers["transfers"]),
    )
    return table
