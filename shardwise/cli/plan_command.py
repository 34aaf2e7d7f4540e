"""`shardwise plan`: check a plan, print the words, or convert a file; and `shardwise table`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tomli_w
import typer

from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan, words_table
from shardwise.core.plan.plan_check import require
from shardwise.core.tools.arguments import integer

if TYPE_CHECKING:
    from shardwise.derive.table import Derived


def plan_command(
    text: Annotated[str | None, typer.Argument(metavar="[PLAN]", help="A plan to check.")] = None,
    *,
    words: Annotated[bool, typer.Option("--words", help="Print the table of words.")] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Convert a DeepSpeed, Accelerate or torchtitan configuration file."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a plan and print its canonical text; or print the words; or convert a file.

    After "|" layers have words of their own: "dp4 zero3 | embed,head: tp4 zero1".
    """
    if as_json and (text is None or words or file is not None):
        raise bad("--json without a plan", "a plan", 'shardwise plan "dp2" --json')
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


TABLE_ROWS = 2


def table_command(
    model: Annotated[
        str,
        typer.Argument(
            help="gpt, llama:70b, toy:TYPE, hf:./FOLDER, hf:ID, file.py:build and others."
        ),
    ],
    tp: Annotated[int, typer.Option(help="Tensor ranks, as in a plan.")] = 2,
    sp: Annotated[bool, typer.Option("--sp", help="With entries for the sequence.")] = False,
) -> None:
    """Derive a table from one pass of the model, and print it as TOML for verify --table.

    Replicated parameters are listed below it, with their bytes and the reason.
    """
    from shardwise.derive.table import derive_table
    from shardwise.models.registry import find

    integer("--tp", tp, 2, 2)
    found = find(model)
    derived = derive_table(found.plain(), found.batch(TABLE_ROWS, 0), tp, found.loss, sp=sp)
    on = f"{tp} tensor ranks{' with sp' * sp}"
    typer.echo(
        f"# {model} on {on}: {derived.cut_bytes:,} bytes of weights are sharded; a rank sends"
    )
    typer.echo(f"# {derived.sent_bytes:,} bytes in a step of {TABLE_ROWS} rows.")
    typer.echo(toml(derived))


def toml(derived: "Derived") -> str:
    """The text of a file for --table, with comments for replicated parameters."""
    table, whole = derived.table, sorted(derived.whole, key=lambda each: -each.bytes)
    values = {
        "derived": True,  # the first step is compared with the plain model
        "heads": table.heads,
        "kv_heads": table.kv_heads,
        "styles": dict(table.styles),
        "sequence": dict(table.sequence),
        "sets": {pattern: dict(numbers) for pattern, numbers in table.sets},
    }
    text = tomli_w.dumps({name: value for name, value in values.items() if value})
    head = f"# {sum(each.bytes for each in whole):,} bytes stay whole on every rank:"
    lines = [f"#   {each.name}  {each.bytes:,} bytes: {each.why}" for each in whole]
    return "\n".join([text, head, *lines])
