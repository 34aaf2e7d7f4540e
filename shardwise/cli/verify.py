"""`shardwise verify PLAN`: proves a plan on a model, and prints a table or JSON."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from shardwise.cli.configured import CONFIG, JSON, MODEL, PLAN, configured
from shardwise.comm.start.rendezvous import environment
from shardwise.verify.command import verify
from shardwise.verify.inputs import Options, table_in
from shardwise.verify.report import show

STEPS = 3


def verify_command(
    plan: Annotated[str | None, PLAN] = None,
    *,
    model: Annotated[str | None, MODEL] = None,
    as_json: Annotated[bool, JSON] = False,
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Styles by module, TOML or JSON.")
    ] = None,
    config: Annotated[Path | None, CONFIG] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, the default; or cuda, with a GPU for each rank.")
    ] = None,
) -> None:
    """Prove that a plan computes what one process computes, with the predicted bytes and memory."""
    start = environment()
    run = configured(config, plan, model)
    styles = run.table if table is None else table_in(table)
    doing = f"{run.plan} on {run.name}: {STEPS} steps, beside one process"
    with Console(stderr=True).status(Text(doing)):
        found = verify(run.plan, run.model, STEPS, Options(table=styles), device=device)
    if start is None or start.rank == 0:
        if as_json:
            print(found.json())
            for note in found.notes:
                print(note, file=sys.stderr)
        else:
            show(found, Console(emoji=False, markup=False))
    raise typer.Exit(0 if found.holds else 1)
