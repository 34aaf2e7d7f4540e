"""this file is `shardwise checkpoint inspect`, to be registered by the command line."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.checkpoint.contents import Contents, describe


def inspect_command(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A checkpoint, or a folder of checkpoints.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a checkpoint holds: tensors with shapes, dtypes and bytes, and its scalars."""
    contents = describe(path)
    if as_json:
        typer.echo(json.dumps(_object(contents)))
    else:
        for line in _lines(contents):
            typer.echo(line)


def _object(contents: Contents) -> dict[str, Any]:
    return asdict(contents) | {"path": str(contents.path), "bytes": contents.bytes}


def _lines(contents: Contents) -> Iterator[str]:
    ranks = f"{contents.ranks} rank{'s' if contents.ranks > 1 else ''}"
    yield f"{contents.path}  saved by {ranks}, {len(contents.tensors)} tensors"
    yield ""
    width = max((len(tensor.name) for tensor in contents.tensors), default=0)
    for tensor in contents.tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        yield f"{tensor.name:{width}}  {tensor.dtype:9} {shape:>20} {tensor.bytes:>16,} bytes"
    yield f"{'':{width}}  {'':9} {'in all':>20} {contents.bytes:>16,} bytes"
    yield ""
    yield json.dumps(contents.scalars, indent=2)
