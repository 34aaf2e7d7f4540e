"""Writes the page of measurements from the data in benchmarks/results."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parents[1] / "benchmarks" / "results"
#: The files of the page, in its order; tables that are not shown there are in the files alone.
FILES: Final = (
    *("data", "tensor", "context", "pipeline", "layers", "experts", "memory", "offload", "disk"),
    *("parity", "quickstart", "derived", "mutations"),
)
HEAD: Final = """\
# Measurements

<!-- Written by `make docs` from benchmarks/results: change the data, not this page. -->

`python -m benchmarks SUITE` compares Shardwise with torch and DeepSpeed. All contenders run in
the same processes, take turns in each round, and have the same model, weights, batches and
optimizer. `time` is the median over the rounds of a step's time divided by that of the first row
(of torch's same schedule for pipelines). `bytes` are those sent, divided by the least possible.
Absolute times vary on a shared machine; ratios, bytes and live memory are stable. This page is a
summary: the data, with more tables and other machines, are in `benchmarks/results/`.

**Step times on machines A, B and D are from the version before 2026-11-26**, which had nodes of
its own for norms and embeddings. Products and norms are now torch's. Measured again on machine B
with 1M parameters, the median of two or three runs: `ddp` 0.85 of the time of torch's DDP, `zero3`
1.19, `tp` 0.41 of torch's tensor parallelism, `1f1b:4` 1.21 of torch's schedule.

**One GPU has been used, never two.** On it ran a world of one on NCCL, and plans of several ranks,
which shared it as threads: waits for the device, pinned copies on streams of their own, memory of a
GPU. NCCL's collectives between GPUs, and their links, have not run."""
OTHERS: Final = "## Other suites"
MACHINES: Final = "The machines; all but G have two processor cores:"


def page() -> str:
    """The page, in Markdown."""
    machines = read("machines")
    listed = "\n".join(f"- **{name}**: {text}" for name, text in machines.items())
    suites = [read(name) for name in FILES]
    shown = [data for data in suites if any(run.get("shown") for run in data["run"])]
    others = [f"- **{data['title']}.** {data['says']}" for data in suites if data not in shown]
    tables = [part for data in shown for part in _of(data)]
    parts = [HEAD, MACHINES, listed, *tables, OTHERS, "\n".join(others)]
    return "\n\n".join(parts) + "\n"


def read(name: str) -> dict[str, Any]:
    """The data of a suite."""
    return tomllib.loads((RESULTS / f"{name}.toml").read_text(encoding="utf-8"))


def _of(data: dict[str, Any]) -> Iterator[str]:
    yield f"## {data['title']}"
    yield data["says"]
    for run in data["run"]:
        if run.get("shown"):
            yield _caption(run)
            yield _table(run)


def _caption(run: dict[str, Any]) -> str:
    machine = f", machine {run['machine']}" if "machine" in run else ""
    note = f" ({run['note']})" if "note" in run else ""
    return f"`{run['command']}`{machine}: {run['title']}{note}."


def _table(run: dict[str, Any]) -> str:
    lines = [run["columns"], ["---"] * len(run["columns"]), *run["rows"]]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
