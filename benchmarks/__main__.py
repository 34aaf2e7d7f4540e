"""Measure side by side with the peers: `python -m benchmarks SUITE`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks import async_save, cuda, disk, foresight, largest, update
from benchmarks.contenders.roster import SUITES
from benchmarks.stack import parameter_count
from benchmarks.suite import LENGTHS, MOST_REPEATS, plan_tasks, run
from benchmarks.table import as_json, as_text
from shardwise.cli.main import run_app
from shardwise.core.errors import bad
from shardwise.core.tools.arguments import choice, integer
from shardwise.core.tools.suggest import suggest

#: Suites that measure a part of offload or of saving, and the number of parameters without --size.
_OF_PARTS: Final = {"update": "100M", "disk": "25M", "save": "1M"}
_ON_CUDA: Final = ("data", "offload")


def bench_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SUITE",
            help="data, tensor, context, pipeline, memory, offload, layers, dataparallel, experts, "
            "update, disk, save, foresight; then contenders, for disk its folder, or plans.",
        ),
    ],
    size: Annotated[
        list[str] | None, typer.Option(help="small, tiny; of update, disk and save a number, 25M.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Processes on this machine, 2 or more.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Rounds; a median is over them.")] = None,
    link: Annotated[str | None, typer.Option(help="Between two hosts at this rate: 1gbit.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda: one rank on NCCL.")] = "cpu",
    as_object: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure side by side with the peers: step time, bytes on the wire, memory, loss."""
    suite, *contenders = words
    every = (*SUITES, *_OF_PARTS, "foresight")
    if suite not in every:
        close = suggest(suite, every, 0.5) or every[0]
        raise bad(f'the suite "{suite}"', ", ".join(every), f"python -m benchmarks {close}")
    choice("--device", device, ("cpu", "cuda"))
    if device == "cuda":
        _require_one_rank(suite, contenders, size, link, nproc)
    if suite in _OF_PARTS and device == "cpu":
        if link is not None:
            raise bad(
                f"--link with the suite {suite}", "no --link", f"python -m benchmarks {suite}"
            )
        print(_of_part(suite, contenders, size or (), nproc, repeats, as_object))
        return
    if suite == "foresight":
        print(_foresight(contenders, size or (), nproc, link, repeats, as_object=as_object))
        return
    ranks = 2 if nproc is None else nproc
    if device == "cuda":
        print(_on_cuda(suite, contenders, repeats, as_object))
        return
    if suite == "offload" and contenders and Path(contenders[0]).is_dir():
        raise bad(
            f"the folder {contenders[0]} without --device cuda",
            "a folder with --device cuda, for the largest model; or the suite disk, on a CPU",
            f"python -m benchmarks offload {contenders[0]} --device cuda, "
            f"or python -m benchmarks disk {contenders[0]}",
        )
    if link is not None and ranks != 2:
        raise bad(f"{ranks} ranks with --link", "one rank on each of two hosts", "--nproc 2")
    rows = run(plan_tasks(suite, size or (), ranks, repeats, contenders), ranks, link)
    print(json.dumps(as_json(rows), indent=2) if as_object else as_text(rows))


def _foresight(
    plans: Sequence[str],
    sizes: Sequence[str],
    ranks: int | None,
    link: str | None,
    rounds: int | None,
    *,
    as_object: bool,
) -> str:
    """The results of the suite `foresight`."""
    size = sizes[0] if len(sizes) == 1 else "tiny"
    choice("--size", size, LENGTHS)
    if len(sizes) > 1 or ranks not in (None, foresight.RANKS) or link is not None:
        raise bad(
            "the suite foresight with several sizes, --nproc or --link",
            "one size, on two ranks of this machine",
            "python -m benchmarks foresight --size small",
        )
    if rounds is not None:
        integer("--repeats", rounds, 1, 5, MOST_REPEATS)
    found = foresight.run(size, rounds, plans)
    return json.dumps(asdict(found), indent=2) if as_object else foresight.as_text(found)


def _require_one_rank(
    suite: str,
    words: Sequence[str],
    sizes: Sequence[str] | None,
    link: str | None,
    ranks: int | None,
) -> None:
    """Raise InputError for what does not go with --device cuda."""
    if suite not in _ON_CUDA:
        allowed = f"the suites {' and '.join(_ON_CUDA)}, since --device cuda runs on one rank"
        raise bad(
            f"--device cuda with the suite {suite}",
            allowed,
            f"python -m benchmarks {suite} --device cpu",
        )
    if len(words) > (suite == "offload") or sizes or link or ranks is not None:
        folder = "; offload also with the folder of a disk" * (suite == "offload")
        raise bad(
            "--device cuda with contenders, --size, --nproc or --link",
            "--device cuda with --repeats and --json: it runs one rank on its own models" + folder,
            f"python -m benchmarks {suite}{' /mnt/nvme' * bool(folder)} --device cuda",
        )


def _on_cuda(suite: str, words: Sequence[str], rounds: int | None, as_object: bool) -> str:
    """The results of a suite on one GPU; `words` may be the folder of the suite `offload`."""
    if rounds is not None:
        integer("--repeats", rounds, 1, 5, MOST_REPEATS)
    if suite == "data":
        rows = cuda.run(rounds)
        return json.dumps(as_json(rows), indent=2) if as_object else cuda.as_text(rows)
    found = largest.run(Path(words[0]) if words else None, rounds)
    return json.dumps(as_json(found), indent=2) if as_object else largest.as_text(found)


def _of_part(
    suite: str,
    words: Sequence[str],
    sizes: Sequence[str],
    ranks: int | None,
    rounds: int | None,
    as_object: bool,
) -> str:
    """The results of the suites `update`, `disk` and `save`."""
    usual = _OF_PARTS[suite]
    if len(sizes) > 1:
        raise bad(f"--size {' --size '.join(sizes)}", "one size", f"--size {usual}")
    count = parameter_count(sizes[0] if sizes else usual, usual)
    if rounds is not None:
        integer("--repeats", rounds, 1, 5, MOST_REPEATS)
    if suite == "update":
        if words or ranks not in (None, 1):
            given = f"python -m benchmarks update {' '.join(words) or f'--nproc {ranks}'}"
            raise bad(given, "no further words, and one rank", "python -m benchmarks update")
        found = update.run(count, rounds)
        return json.dumps(as_json(found), indent=2) if as_object else update.as_text(found)
    if suite == "save":
        if words:
            given = f"python -m benchmarks save {' '.join(words)}"
            raise bad(given, "no further words", "python -m benchmarks save")
        integer("--nproc", 1 if ranks is None else ranks, 1, 2)
        costs = async_save.run(count, ranks or 1, rounds)
        return json.dumps(as_json(costs), indent=2) if as_object else async_save.as_text(costs)
    if len(words) != 1:
        given = f"python -m benchmarks disk with {len(words)} folders"
        raise bad(given, "the folder whose disk is measured", "python -m benchmarks disk /mnt/nvme")
    if ranks is not None:
        integer("--nproc", ranks, 1, 1)
    rows = disk.run(Path(words[0]), count, ranks or 1, rounds)
    return json.dumps(as_json(rows), indent=2) if as_object else disk.as_text(rows)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(bench_command)
    run_app(app, sys.argv[1:], "python -m benchmarks")
