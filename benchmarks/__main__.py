"""Measure side by side with the peers: `python -m benchmarks SUITE`."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks import async_save, disk, one_device
from benchmarks.contenders.contender import parameter_count
from benchmarks.contenders.roster import SUITES
from benchmarks.suite import MOST_REPEATS, plan_tasks, run
from benchmarks.table import as_json, as_text
from shardwise.cli.main import run_app
from shardwise.core.errors import bad
from shardwise.core.tools.arguments import choice, integer, suggest

#: Suites that measure a part of offload or of saving, and the number of parameters without --size.
_OF_PARTS: Final = {"disk": "25M", "save": "1M"}


def bench_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SUITE",
            help="data, loops, tensor, context, pipeline, memory, offload, layers, experts, host, "
            "disk, save; then contenders, or for disk its folder.",
        ),
    ],
    size: Annotated[
        list[str] | None, typer.Option(help="small, tiny; of disk and save a number, 25M.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Processes on this machine, 2 or more.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Rounds; a median is over them.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda: one rank on NCCL.")] = "cpu",
    as_object: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure side by side with the peers: step time, bytes on the wire, memory, loss."""
    suite, *contenders = words
    every = (*SUITES, "host", *_OF_PARTS)
    if suite not in every:
        close = suggest(suite, every, 0.5) or every[0]
        raise bad(f'the suite "{suite}"', ", ".join(every), f"python -m benchmarks {close}")
    choice("--device", device, ("cpu", "cuda"))
    if repeats is not None:
        integer("--repeats", repeats, 1, 5, MOST_REPEATS)
    rows: list[Any]
    text: Callable[[Any], str]
    if device == "cuda" or suite == "host":  # of a world of one
        alone = "data --device cuda" if device == "cuda" else "host"
        if suite != alone.split(maxsplit=1)[0] or contenders or size or nproc is not None:
            given = f"python -m benchmarks {' '.join(words)} --device {device} and these options"
            allowed = "one rank on its own models, with --repeats and --json"
            raise bad(given, allowed, f"python -m benchmarks {alone}")
        rows, text = one_device.run(repeats, device), one_device.as_text
    elif suite in _OF_PARTS:
        rows, text = _of_part(suite, contenders, size or (), nproc, repeats)
    else:
        ranks = 2 if nproc is None else nproc
        rows = run(plan_tasks(suite, size or (), ranks, repeats, contenders), ranks)
        text = as_text
    print(json.dumps(as_json(rows), indent=2) if as_object else text(rows))


def _of_part(
    suite: str, words: Sequence[str], sizes: Sequence[str], ranks: int | None, rounds: int | None
) -> tuple[list[Any], Callable[[Any], str]]:
    """The results of the suites `disk` and `save`, and what prints them."""
    usual = _OF_PARTS[suite]
    if len(sizes) > 1:
        raise bad(f"--size {' --size '.join(sizes)}", "one size", f"--size {usual}")
    count = parameter_count(sizes[0] if sizes else usual, usual)
    integer("--nproc", 1 if ranks is None else ranks, 1, 2)
    if suite == "save" and not words:
        return async_save.run(count, ranks or 1, rounds), async_save.as_text
    if suite == "disk" and len(words) == 1:
        return disk.run(Path(words[0]), count, ranks or 1, rounds), disk.as_text
    given = f"python -m benchmarks {suite} with {len(words)} further words"
    allowed = "the folder whose disk is measured; none for save"
    raise bad(given, allowed, f"python -m benchmarks {suite}{' /mnt/nvme' * (suite == 'disk')}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(bench_command)
    run_app(app, sys.argv[1:], "python -m benchmarks")
