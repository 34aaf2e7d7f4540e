"""`shardwise checkpoint inspect`, which the command line registers."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.checkpoint.contents import MODEL, OPTIMIZER, Contents, describe
from shardwise.checkpoint.folder import CHECKPOINTS, all_in, is_whole, passed_over


def inspect_command(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A checkpoint, a folder of them, or a run's folder."),
    ],
    every: Annotated[
        bool, typer.Option("--all", help="List every tensor, and print all scalars.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte, and compare it with what was saved.")
    ] = False,
) -> None:
    """Show what a checkpoint holds; with --all each tensor with its shape, dtype and bytes.

    Exit code 2 for a checkpoint that is damaged or has a file of another one in it.
    """
    folder = of_run(path)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        contents = describe(folder, deep)
    for warning in noted:
        typer.echo(warning.message, err=True)
    note = passed_over(folder)
    if as_json:
        if note:
            typer.echo(note, err=True)
        typer.echo(json.dumps(_object(contents)))
    else:
        for line in (f"Note: {note}",) * bool(note):
            typer.echo(line)
        for line in _lines(contents, every=every):
            typer.echo(line)


def of_run(path: Path) -> Path:
    """The folder of checkpoints in a run's folder; any other path is returned unchanged."""
    inside = path / CHECKPOINTS
    try:
        return inside if inside.is_dir() and not is_whole(path) and not all_in(path) else path
    except (OSError, ValueError):  # an impossible name; `find` raises the error
        return path


def _object(contents: Contents) -> dict[str, Any]:
    sums = {
        "path": str(contents.path),
        "bytes": contents.bytes,
        "parameters": contents.parameters,
        "model_bytes": contents.bytes_of(MODEL),
        "optimizer_bytes": contents.bytes_of(OPTIMIZER),
    }
    return asdict(contents) | sums


def _lines(contents: Contents, *, every: bool) -> Iterator[str]:
    ranks = f"{contents.ranks} rank{'s' if contents.ranks > 1 else ''}"
    step, plan = contents.scalars.get("step"), contents.scalars.get("plan")
    head = f"{contents.path}  saved by {ranks}" + (f" under the plan '{plan}'" if plan else "")
    yield head + (f" after step {step}" if step is not None else "")
    yield (
        f"{len(contents.tensors)} tensors, {contents.parameters:,} parameters: "
        f"{contents.bytes_of(MODEL):,} bytes of the model, "
        f"{contents.bytes_of(OPTIMIZER):,} bytes of the optimizer"
    )
    if not every:
        yield from _summed(contents)
        return
    yield ""
    width = max((len(tensor.name) for tensor in contents.tensors), default=0)
    for tensor in contents.tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        yield f"{tensor.name:{width}}  {tensor.dtype:9} {shape:>20} {tensor.bytes:>16,} bytes"
    yield f"{'':{width}}  {'':9} {'in all':>20} {contents.bytes:>16,} bytes"
    yield ""
    yield json.dumps(contents.scalars, indent=2)


def _summed(contents: Contents) -> Iterator[str]:
    """The tensors by kind and dtype, and the scalars that are numbers or text."""
    groups = dict[tuple[str, str], list[int]]()
    for tensor in contents.tensors:
        kind = "/".join(tensor.name.split("/")[: 2 if tensor.name.startswith(OPTIMIZER) else 1])
        groups.setdefault((kind, tensor.dtype), []).append(tensor.bytes)
    for (kind, dtype), sizes in groups.items():
        yield f"  {kind:24} {len(sizes):>6} in {dtype:9} {sum(sizes):>20,} bytes"
    for name, value in contents.scalars.items():
        if isinstance(value, int | float | str):
            yield f"  {name}: {value}"
    yield "--all lists every tensor and all scalars"
