"""this file is `shardwise schedule`, to be registered by the command line."""

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shardwise.core.errors import bad
from shardwise.core.schedule import draw, text
from shardwise.core.schedule.check import check
from shardwise.core.schedule.clock import Costs, Timeline, clock
from shardwise.core.schedule.library import LIBRARY, Entry, Size, entry, size
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.memory import peaks, versions
from shardwise.core.schedule.schedule import Schedule


@dataclass(frozen=True)
class Request:
    """What the command line says."""

    name: Annotated[
        str, typer.Argument(metavar="NAME", help="1f1b, or 1f1b:8 as in a plan, or a text FILE.")
    ]
    stages: Annotated[int | None, typer.Option(help="Ranks of the pipeline; 4 if not given.")] = (
        None
    )
    microbatches: Annotated[int | None, typer.Option(help="A batch's; 8 if not given.")] = None
    chunks: Annotated[int | None, typer.Option(help="Stages that a rank owns.")] = None
    batches: Annotated[int, typer.Option(help="With 2bw: batches without a drain.")] = 1
    costs: Annotated[
        str, typer.Option(help="Time of each action; F=1/2/1/1 gives each stage its own.")
    ] = "F=1,I=1,W=1"
    hop: Annotated[float, typer.Option(help="Time of a message between two ranks.")] = 0.0
    svg: Annotated[Path | None, typer.Option(help="Draw into this file.")] = None
    png: Annotated[Path | None, typer.Option(help="Draw into this file.")] = None
    text: Annotated[bool, typer.Option("--text", help="Print it as text, to be edited.")] = False
    lowered: Annotated[
        bool, typer.Option("--lowered", help="Print it as text, with its transfers.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False


def schedule_command(**given: Any) -> None:
    """Draw a pipeline schedule and price it: makespan, bubble, activations, transfers."""
    show(Request(**given))


# typer reads the options off a function's signature: here they are the fields of the request
schedule_command.__signature__ = inspect.signature(Request)


@dataclass(frozen=True)
class Subject:
    """What is drawn: a schedule; from the library with its entry and size, or a user's own."""

    title: str
    schedule: Schedule
    known: tuple[Entry, Size] | None = None


def show(request: Request) -> None:
    """Answer the request. Raises InputError for what cannot be drawn."""
    subject = _subject(request)
    costs = read_costs(request.costs, request.hop, len(subject.schedule.home))
    whole = lower(subject.schedule, gather=bool(costs.GATHER))
    timeline = clock(whole, costs)
    _pictures(request, timeline, subject.title)
    if request.text or request.lowered:
        typer.echo(text.write(whole if request.lowered else subject.schedule), nl=False)
        return
    numbers = _numbers(subject, timeline, costs)
    if request.as_json:
        typer.echo(json.dumps(numbers))
        return
    paper = f" ({subject.known[0].paper})" if subject.known else ""
    typer.echo(f"{subject.title}{paper}\n\n{draw.as_text(timeline)}\n")
    Console().print(_table(numbers))


def read_costs(given: str, hop: float, stages: int) -> Costs:
    """Costs as they are written: F=1,I=1,W=1; F=1/2 is 1 on stage 0 and 2 on stage 1."""
    known = [field.name for field in fields(Costs) if field.name != "hop"]
    found: dict[str, Any] = {"hop": hop}
    for part in given.split(","):
        op, _, times = part.strip().partition("=")
        values = [_time(time) for time in times.split("/")]
        if op not in known or op in found or None in values or len(values) not in (1, stages):
            allowed = (
                f"{', '.join(known)}, each a time from 0 up, or one for each of {stages} stages"
            )
            raise bad(f"the costs '{given}'", allowed, "--costs F=1,I=1,W=1")
        each = tuple(value for value in values if value is not None)
        found[op] = each if len(values) > 1 else sum(each)
    if _time(str(hop)) is None:
        raise bad(f"a hop of {hop}", "a time from 0 up", "--hop 0.1")
    return Costs(**found)


def _time(given: str) -> float | None:
    try:
        return time if math.isfinite(time := float(given)) and time >= 0 else None
    except ValueError:
        return None


def _subject(request: Request) -> Subject:
    """The schedule that is asked for."""
    name, _, numbers = request.name.partition(":")
    if name not in LIBRARY and (Path(request.name).exists() or "." in request.name):
        return _own(request)
    m, _, v = numbers.partition("x")
    if numbers and not (m.isdecimal() and (v or "1").isdecimal()):
        raise bad(f"'{request.name}'", "a name, or with a colon M or MxV after it", f"{name}:8")
    if numbers and (request.microbatches or (v and request.chunks)):
        given = f"'{request.name}' and its numbers again as options"
        raise bad(given, "one or the other", name)
    microbatches = int(m) if numbers else request.microbatches
    if microbatches is None:
        microbatches = 1 if name == "naive" else 8
    stages = 4 if request.stages is None else request.stages
    n = size(name, stages, microbatches, int(v) if v else request.chunks, request.batches)
    found = entry(name)
    chunks = f", {n.v} chunks a rank" * (n.v > 1) + f", {n.batches} batches" * (n.batches > 1)
    title = f"{found.title}: {_count(n.p, 'rank')}, {_count(n.m, 'microbatch', 'es')}{chunks}"
    return Subject(title, found.build(n), (found, n))


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


def _own(request: Request) -> Subject:
    """The schedule that the user has written."""
    if request.stages or request.microbatches or request.chunks or request.batches > 1:
        given = f"the file {request.name} and sizes as options"
        raise bad(given, "a file alone: its rows say its size", request.name)
    try:
        written = Path(request.name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise bad(
            f"the file {request.name}: {error}", "a schedule as text", "1f1b --text"
        ) from error
    schedule = text.read(written)
    check(schedule)
    sizes = _count(schedule.ranks, "rank"), _count(schedule.microbatches, "microbatch", "es")
    return Subject(f"{request.name}: {', '.join(sizes)}", schedule)


def _pictures(request: Request, timeline: Timeline, title: str) -> None:
    """The files that are asked for."""
    try:
        if request.svg:
            request.svg.write_text(draw.as_svg(timeline, title), encoding="utf-8")
        if request.png:
            from shardwise.train.timeline import as_png

            as_png(request.png, timeline, title)
    except OSError as error:
        where = "a file in a folder that is there and can be written"
        raise bad(
            f"a picture that cannot be written: {error}", where, "--svg pipeline.svg"
        ) from error


def _numbers(subject: Subject, timeline: Timeline, costs: Costs) -> dict[str, Any]:
    """What the clock says and, where there is a closed form, what that says."""
    schedule = timeline.schedule
    sent = Counter(s.token.kind for row in schedule.rows for s in row if s.op == "SEND")
    numbers: dict[str, Any] = {
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
        "formula": None,
    }
    if subject.known:
        numbers["formula"] = _formula(*subject.known, schedule, costs)
    return numbers


def _formula(found: Entry, n: Size, schedule: Schedule, costs: Costs) -> dict[str, Any]:
    """The closed forms: those of time for stages alike and no hop, with I and W at F = I = W."""
    f, i, w, b = (costs.of(op, 0) for op in ("F", "I", "W", "B"))
    halves = any(step.op == "I" for row in schedule.rows for step in row)
    alike = Costs(f, i, w, None if costs.B is None else b)  # all stages, and nothing else costs
    holds = costs == alike and (not halves or (f == i == w and b == 2 * f))
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
    """The clock's numbers beside those of the closed forms."""
    form: dict[str, Any] = numbers["formula"] or {}
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
