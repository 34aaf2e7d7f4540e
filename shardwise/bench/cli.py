"""The command `shardwise bench`."""

import json
from typing import Annotated

import typer

from shardwise.bench import cuda
from shardwise.bench.roster import SUITES
from shardwise.bench.suite import plan_tasks, run
from shardwise.bench.table import as_json, as_text
from shardwise.core.arguments import choice
from shardwise.core.errors import bad
from shardwise.core.suggest import suggest


def bench_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SUITE",
            help="data, tensor, pipeline, memory, offload, layers, dataparallel, experts; after "
            "it contenders.",
        ),
    ],
    size: Annotated[
        list[str] | None, typer.Option(help="small, tiny; both by default, of experts tiny.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes on this machine, 2 or more.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Rounds; a median is over them.")] = None,
    link: Annotated[str | None, typer.Option(help="Between two hosts at this rate: 1gbit.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda: one rank on NCCL.")] = "cpu",
    as_object: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure side by side with the peers: step time, bytes on the wire, memory, loss."""
    suite, *contenders = words
    if suite not in SUITES:
        close = suggest(suite, SUITES, 0.5) or next(iter(SUITES))
        raise bad(f'the suite "{suite}"', ", ".join(SUITES), f"shardwise bench {close}")
    choice("--device", device, ("cpu", "cuda"))
    if device == "cuda" and suite != "data":
        allowed = "the suite data, since --device cuda runs on one rank"
        raise bad(f"--device cuda with the suite {suite}", allowed, f"bench {suite} --device cpu")
    if device == "cuda" and (contenders or size or link or ranks is not None):
        raise bad(
            "--device cuda with contenders, --size, --ranks or --link",
            "--device cuda with --repeats and --json only: it runs one rank on its own models",
            "shardwise bench data --device cuda",
        )
    ranks = 2 if ranks is None else ranks
    if device == "cuda":
        rows = cuda.run(repeats)
        print(json.dumps(cuda.as_json(rows), indent=2) if as_object else cuda.as_text(rows))
        return
    if link is not None and ranks != 2:
        raise bad(f"{ranks} ranks with --link", "one rank on each of two hosts", "--ranks 2")
    rows = run(plan_tasks(suite, size or (), ranks, repeats, contenders), ranks, link)
    print(json.dumps(as_json(rows), indent=2) if as_object else as_text(rows))
