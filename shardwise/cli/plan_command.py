"""`shardwise plan`: check a plan, print the words, convert a file; or search for the best plan.

shardwise plan "dp2 zero3"                                            check it
shardwise plan --search --model llama:8b --cluster h100-sxm --ranks 64   the ten best
shardwise plan --search ... --why "dp64 zero1 bf16"                   explain one
shardwise plan --search ... --measure 3                               and run the three best here
"""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from shardwise.cli.configured import CONFIG
from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan, words_table
from shardwise.core.plan.plan_check import require
from shardwise.core.tools.arguments import integer
from shardwise.core.tools.signs_of_life import signs_of_life

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.cli.measured_plans import MeasuredPlan
    from shardwise.engine.options import EngineOptions
    from shardwise.models.trainable import Trainable
    from shardwise.prediction.prediction import Prediction
    from shardwise.prediction.search.result import SearchResult

SHOWN = 10


def plan_command(
    text: Annotated[str | None, typer.Argument(metavar="[PLAN]", help="A plan to check.")] = None,
    *,
    words: Annotated[bool, typer.Option("--words", help="Print the table of words.")] = False,
    file: Annotated[
        Path | None,
        typer.Option("--from", help="Convert DeepSpeed's JSON, accelerate's YAML, torchtitan's."),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Find the fastest plans that fit on --ranks.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="gpt, llama:70b, hf:NAME, hf:./FOLDER, file.py:build and others."),
    ] = None,
    config: Annotated[Path | None, CONFIG] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help="a100-80gb, h100-sxm, h200, b200 or a file."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Devices to plan for.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Rows of a step of all ranks; one a rank if not given.")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(help="Positions of a row; the model's own if not given.")
    ] = None,
    why: Annotated[
        str | None, typer.Option(metavar="PLAN", help="Explain what is wrong with this plan.")
    ] = None,
    measure: Annotated[
        int | None, typer.Option(metavar="N", help="Run the N best plans here, and rank by that.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a plan and print its canonical text; or print the words; or search for the best plan.

    After "|" layers have words of their own: "dp4 zero3 | embed,head: tp4 zero1".
    """
    if search or why is not None:
        if text is not None:
            raise bad(f'the plan "{text}" beside --search', "one of them", f'--why "{text}"')
        if cluster is None or ranks is None:
            example = "--search --model llama:8b --cluster h100-sxm --ranks 64"
            raise bad("--search without --cluster or --ranks", "both of them", example)
        if measure is not None:
            from shardwise.cli.measured_plans import device_for

            integer("--measure", measure, 1, 3, SHOWN)
            device_for(ranks)
        task = SearchTask(model, config, cluster, ranks, batch, sequence, measure)
        _search(task, why, as_json=as_json)
        return
    searched = {"model": model, "config": config, "cluster": cluster, "ranks": ranks}
    searched |= {"batch": batch, "sequence": sequence, "measure": measure}
    given = [f"--{name} {value}" for name, value in searched.items() if value is not None]
    if given:
        example = "--search --model gpt --cluster h100-sxm --ranks 2"
        raise bad(f"{' '.join(given)} without --search", "all of a search", example)
    _check(text, file, words=words, as_json=as_json)


def _check(text: str | None, file: Path | None, *, words: bool, as_json: bool) -> None:
    """Check a plan, print the words, or convert a file."""
    if as_json and (text is None or words or file is not None):
        raise bad("--json without a plan", "a plan, or --search", 'shardwise plan "dp2" --json')
    if file is not None:
        from shardwise.migrate.read import imported

        if text is not None:
            raise bad(f'--from {file} beside the plan "{text}"', "one of them", f"--from {file}")

        draft, project = imported(file)
        print(draft.toml(file.name, project), end="")
        return
    if words or text is None:
        print(words_table())
        return
    read = Plan.parse(text)
    require(read)
    if as_json:
        print(json.dumps({"plan": str(read), "ranks": read.size, "open": read.open}))
        return
    needs = f"{read.size} rank{'s' * (read.size > 1)}"
    more = ", or a multiple: the others are data ranks" * read.open
    print(f"{read} ({needs}{more})")


class SearchTask(NamedTuple):
    """The options of --search as written."""

    model: str | None
    config: Path | None
    cluster: str
    ranks: int
    batch: int | None
    sequence: int | None
    measure: int | None


def _search(task: SearchTask, why: str | None, *, as_json: bool) -> None:
    from shardwise.cli.configured import configured
    from shardwise.derive.plan_search import search
    from shardwise.prediction.cluster_file import cluster_of

    cluster = cluster_of(task.cluster)
    plan = None if why is None else _asked(why, task.ranks)
    run = configured(task.config, "dp1 bf16", task.model)
    trainable, options, sample = _model(run, task.sequence)
    rows = task.batch or run.batch or task.ranks
    known = plan and _prediction(trainable, options, plan, rows, task.sequence)
    with signs_of_life(lambda: f"plans of {run.name} on {task.ranks} ranks"):
        found = search(trainable.plain(), cluster, task.ranks, sample, rows=rows, options=options)
    measured = _measured(found, task)
    if as_json:
        told: dict[str, Any] = {} if known is None else {"why": found.why(known)}
        told |= {"measured": [each.as_json() for each in measured]} if measured else {}
        print(json.dumps(found.as_json(SHOWN) | told))
        return
    if known is not None:
        print(found.why(known))
        if measured:
            _show_measured(measured)
        return
    if found.best is None:
        raise _nothing(found, run.name)
    _show(found, task, run.name, measured)


def _measured(found: "SearchResult", task: SearchTask) -> "list[MeasuredPlan]":
    """The best plans by their measured time, if it was asked for."""
    if task.measure is None or found.best is None:
        return []
    from shardwise.cli.measured_plans import measure_plans

    return measure_plans(found.ranked[: task.measure], task.config, task.model, task.sequence)


def _asked(text: str, ranks: int) -> Plan:
    """The plan of --why on these ranks. Raises InputError if it cannot run on them."""
    plan = Plan.parse(text)
    require(plan, ranks)
    return plan.completed(ranks)


def _model(run: Any, sequence: int | None) -> "tuple[Trainable, EngineOptions, Any]":
    """The model of a command line, the options of its engine, and a batch of one row."""
    from shardwise.cli.predict_command import resized
    from shardwise.models.registry import find
    from shardwise.verify import parity
    from shardwise.verify.oracles import batches
    from shardwise.verify.proof_options import Options

    trainable = find(run.model)
    if run.config is None:
        options = parity.build_options(trainable, run.plan, Options())
        options = replace(options, clip=1.0)
    else:
        options = run.options(run.table)
    sample = resized(trainable.batch(1, batches.SEED), sequence, run.name)
    return trainable, replace(options, kernels="cuda"), sample


def _prediction(
    trainable: "Trainable", options: "EngineOptions", plan: Plan, rows: int, sequence: int | None
) -> "Prediction":
    """The prediction for the plan of --why, recorded for it alone."""
    from shardwise.cli.predict_command import resized
    from shardwise.engine.predict import predict_with
    from shardwise.verify.oracles import batches
    from shardwise.verify.proof_options import Options
    from shardwise.verify.smoke_test import with_table

    least = plan.shares * plan.microbatches
    if rows % least:
        given = f'--batch {rows} under the plan "{plan}"'
        allowed = f"a multiple of its {plan.shares} x {plan.microbatches} microbatches"
        raise bad(given, allowed, f"--batch {least * max(1, rows // least)}")
    own = resized(trainable.batch(rows // plan.shares, batches.SEED), sequence, trainable.name)
    table = with_table(trainable, plan, Options(table=options.table)).table
    return predict_with(trainable.plain(), plan, own, replace(options, table=table))


def _nothing(found: "SearchResult", name: str) -> Exception:
    """The error of a search in which no plan fits."""
    from shardwise.train.measure.progress import size_text

    device, near = found.cluster.device, found.nearest
    given = f"{name} on {found.ranks} ranks of {device.name}, where no plan fits"
    if near is not None:
        over = size_text(near.over_bytes)
        given += f'; the nearest is "{near.plan}", at least {over} over a device\'s '
        given += size_text(device.memory_bytes)
    elif found.refused:
        given += f"; the first is refused: {found.refused[0].reason}"
    if found.fits_on is None:
        return bad(given, "a model whose states fit", "a smaller model, or shorter rows")
    batch = found.batch * found.fits_on // found.ranks
    allowed = f"{found.fits_on} ranks, where a plan fits, with the batch in proportion"
    return bad(given, allowed, f"--ranks {found.fits_on} --batch {batch}")


def _show_measured(measured: "Sequence[MeasuredPlan]") -> None:
    from shardwise.cli.measured_plans import measured_table

    Console(emoji=False, highlight=False, markup=False).print(measured_table(measured))


def _show(
    found: "SearchResult", task: SearchTask, name: str, measured: "Sequence[MeasuredPlan]"
) -> None:
    """The best plans as a table, those that were measured, and the first as a line to paste."""
    from shardwise.train.measure.progress import size_text

    best, console = found.ranked[0], Console(emoji=False, highlight=False, markup=False)
    where = f"{found.ranks} ranks of {found.cluster.device.name}"
    table = Table(title=f"{name} on {where}: {found.batch} rows a step")
    for head in ("plan", "step", "MFU", "memory", "sent", "bound by"):
        table.add_column(head, justify="left" if head in ("plan", "bound by") else "right")
    for each in found.ranked[:SHOWN]:
        sizes = size_text(each.peak_bytes), size_text(sum(each.sent_bytes.values()))
        time = f"{each.seconds:.4g} s", f"{each.time.mfu:.1%}"
        table.add_row(str(each.plan), *time, *sizes, each.bound)
    console.print(table)
    large = sum(each.over_bytes > 0 for each in found.refused)
    wrong = len(found.refused) - large
    console.print(
        f"{len(found.ranked)} plans were timed; {found.slower} are slower by their bound, {large} "
        f"do not fit, {wrong} cannot run.",
        soft_wrap=True,
    )
    if measured:
        _show_measured(measured)
        best = next(each for each in found.ranked if each.plan == measured[0].plan)
    rows = f"--batch {best.rows * best.plan.microbatches}"
    rows += f" --cluster {shlex.quote(task.cluster)}"
    rows += "" if task.sequence is None else f" --sequence {task.sequence}"
    line = f'shardwise predict "{best.plan}" --model {task.model or "gpt"} {rows}'
    if task.config is not None:
        line = f'shardwise train {task.config} --plan "{best.plan}"'
    console.print(f"The best: {line}", soft_wrap=True)
