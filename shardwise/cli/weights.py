"""`shardwise checkpoint export` and `import`, which the command line registers."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from shardwise.checkpoint.export import export, import_weights
from shardwise.cli.inspect import of_run
from shardwise.core.errors import bad
from shardwise.core.tools.arguments import suggest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    done = export(of_run(run), to, overwrite=overwrite, dtype=DTYPES.get(dtype))
    files = f"{done.files} file{'s' * (done.files > 1)}"
    there = {"config.json": done.config, "generation_config.json": done.generation}
    there["the run's tokenizer"] = done.tokenizer
    also = "".join(f", {name}" for name, has in there.items() if has)
    if not done.config:
        also += "; the model has no configuration"
    if not done.tokenizer:
        also += "; no tokenizer: the run's tokens are bytes, or its folder has none"
    typer.echo(f"{done.path}: {done.tensors} tensors, {done.bytes:,} bytes in {files}{also}")


def import_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of safetensors.")],
    to: Annotated[Path, typer.Option("--to", metavar="RUN", help="The run's folder.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove the checkpoints that the run has.")
    ] = False,
) -> None:
    """Make safetensors the first checkpoint of a run: train --resume and sw.load begin with it."""
    typer.echo(f"{import_weights(folder, to, overwrite=overwrite)}: to begin with it, --resume")
