"""`shardwise checkpoint inspect`, `export` and `import`."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from shardwise.checkpoint.export import export, import_weights
from shardwise.checkpoint.folder import TOKENIZER_FILES, of_run, passed_over
from shardwise.checkpoint.open_checkpoint import OPTIMIZER, describe
from shardwise.core.errors import bad
from shardwise.core.tools.arguments import suggest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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

    Exit code 2 for a checkpoint that is damaged, or contains a file from another one.
    """
    folder = of_run(path)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        contents = describe(folder, deep)
    for warning in noted:
        typer.echo(warning.message, err=True)
    note = passed_over(folder)
    if note:
        typer.echo(note if as_json else f"Note: {note}", err=as_json)
    if as_json:
        typer.echo(json.dumps(contents))
        return
    for line in _lines(contents, every=every):
        typer.echo(line)


def _lines(contents: dict[str, Any], *, every: bool) -> Iterator[str]:
    ranks = f"{contents['ranks']} rank{'s' if contents['ranks'] > 1 else ''}"
    scalars, tensors = contents["scalars"], contents["tensors"]
    step, plan = scalars.get("step"), scalars.get("plan")
    head = f"{contents['path']}  saved by {ranks}" + (f" under the plan '{plan}'" if plan else "")
    yield head + (f" after step {step}" if step is not None else "")
    yield (
        f"{len(tensors)} tensors, {contents['parameters']:,} parameters: "
        f"{contents['model_bytes']:,} bytes of the model, "
        f"{contents['optimizer_bytes']:,} bytes of the optimizer"
    )
    if not every:
        yield from _summed(tensors, scalars)
        return
    yield ""
    width = max((len(tensor["name"]) for tensor in tensors), default=0)
    for tensor in tensors:
        shape = " x ".join(map(str, tensor["shape"])) or "scalar"
        name, dtype = f"{tensor['name']:{width}}", f"{tensor['dtype']:9}"
        yield f"{name}  {dtype} {shape:>20} {tensor['bytes']:>16,} bytes"
    yield f"{'':{width}}  {'':9} {'in all':>20} {contents['bytes']:>16,} bytes"
    yield ""
    yield json.dumps(scalars, indent=2)


def _summed(tensors: list[dict[str, Any]], scalars: dict[str, Any]) -> Iterator[str]:
    """The tensors by kind and dtype, and the scalars that are numbers or text."""
    groups = dict[tuple[str, str], list[int]]()
    for tensor in tensors:
        parts = tensor["name"].split("/")
        kind = "/".join(parts[: 2 if tensor["name"].startswith(OPTIMIZER) else 1])
        groups.setdefault((kind, tensor["dtype"]), []).append(tensor["bytes"])
    for (kind, dtype), sizes in groups.items():
        yield f"  {kind:24} {len(sizes):>6} in {dtype:9} {sum(sizes):>20,} bytes"
    for name, value in scalars.items():
        if isinstance(value, int | float | str):
            yield f"  {name}: {value}"
    yield "--all lists every tensor and all scalars"


def export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a checkpoint.")],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="The folder to write.")],
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16; default: as saved.")] = "",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a folder of exported weights.")
    ] = False,
) -> None:
    """Write a checkpoint's weights as safetensors, with the model's own names."""
    if dtype and dtype not in DTYPES:
        raise bad(f"--dtype {dtype}", ", ".join(DTYPES), f"--dtype {suggest(dtype, DTYPES)}")
    done = export(run, to, overwrite=overwrite, dtype=DTYPES.get(dtype))
    files = f"{done.files} file{'s' * (done.files > 1)}"
    others = [*done.others]
    if not {*others} & {*TOKENIZER_FILES}:
        others.append("no tokenizer: the run's tokens are bytes, or its folder has none")
    said = f"{done.tensors} tensors, {done.bytes:,} bytes in {files}; {', '.join(others)}"
    typer.echo(f"{done.path}: {said}")


def import_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of safetensors.")],
    to: Annotated[Path, typer.Option("--to", metavar="RUN", help="The run's folder.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove the checkpoints that the run has.")
    ] = False,
) -> None:
    """Make safetensors the first checkpoint of a run: train --resume and sw.load begin with it."""
    typer.echo(f"{import_weights(folder, to, overwrite=overwrite)}: to begin with it, --resume")
