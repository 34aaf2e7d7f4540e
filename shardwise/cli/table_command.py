"""`shardwise table MODEL`: derives a table of tensor parallelism, and prints it to keep or edit."""

import json
from collections.abc import Iterator
from typing import Annotated

import typer

from shardwise.core.tools.arguments import integer
from shardwise.derive.table import Derived, derive_table
from shardwise.models.registry import find

ROWS = 2


def table_command(
    model: Annotated[
        str, typer.Argument(help="gpt, llama:70b, hf:NAME, hf:./FOLDER, file.py:build and others.")
    ],
    tp: Annotated[int, typer.Option(help="Tensor ranks, as in a plan.")] = 2,
    sp: Annotated[bool, typer.Option("--sp", help="With entries for the sequence.")] = False,
) -> None:
    """Derive a table from one pass of the model, and print it as TOML for verify --table.

    Replicated parameters are listed below it, with their bytes and the reason.
    """
    integer("--tp", tp, 2, 2)
    found = find(model)
    derived = derive_table(found.plain(), found.batch(ROWS, 0), tp, found.loss, sp=sp)
    on = f"{tp} tensor ranks{' with sp' * sp}"
    typer.echo(
        f"# {model} on {on}: {derived.cut_bytes:,} bytes of weights are sharded; a rank sends"
    )
    typer.echo(f"# {derived.sent_bytes:,} bytes in a step of {ROWS} rows.")
    for line in toml(derived):
        typer.echo(line)


def toml(derived: Derived) -> Iterator[str]:
    """The lines of a file for --table, with comments for replicated parameters."""
    table = derived.table
    yield "derived = true  # the first step is compared with the plain model"
    for name, count in (("heads", table.heads), ("kv_heads", table.kv_heads)):
        if count is not None:
            yield f"{name} = {count}"
    for name, entries in (("styles", table.styles), ("sequence", table.sequence)):
        if entries:
            yield f"\n[{name}]"
        for pattern, style in entries:
            yield f"{json.dumps(pattern)} = {json.dumps(style)}"
    for pattern, numbers in table.sets:
        yield f"\n[sets.{json.dumps(pattern)}]"
        for attribute, number in numbers:
            yield f"{attribute} = {json.dumps(number)}"
    if not derived.whole:
        yield "\n# Nothing stays whole on every rank."
        return
    yield f"\n# {sum(each.bytes for each in derived.whole):,} bytes stay whole on every rank:"
    for each in sorted(derived.whole, key=lambda each: -each.bytes):
        yield f"#   {each.name}  {each.bytes:,} bytes: {each.why}"
