"""Each suite of the benchmarks on a model of no size: all train the same, and numbers add up."""

import itertools
import json
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import typer

from benchmarks import async_save, disk, table
from benchmarks.__main__ import bench_command
from benchmarks.contenders.contender import Contender, Loop, Setup, Task
from benchmarks.contenders.roster import ROSTER, SUITES
from benchmarks.measure import Record, measure
from benchmarks.one_device import Pair, compare
from benchmarks.table import least_bytes
from shardwise.checkpoint.folder import find
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.core.zero import ROWS
from shardwise.models.gpt import GPTConfig
from tests.house import ROOT
from tests.pool import run_gloo

MICRO = GPTConfig(
    vocabulary=64, layers=2, hidden_size=32, heads=4, kv_heads=2, intermediate_size=48, sequence=8
)
REFERENCE = SUITES["data"][0]
TASK = Task("micro", MICRO, (REFERENCE,), rows=4, rounds=1, steps=2, warm_up=1)
#: The contenders of each suite that train one model; the first has the loss of all.
SAME: dict[str, tuple[str, ...]] = {
    "data": (REFERENCE, "FSDP2", *ROWS, "DeepSpeed ZeRO-1"),
    "experts": ("torch loop", "experts 8", "experts 8 without ep", "DeepSpeed MoE"),
    "offload": SUITES["offload"],
    "pipeline": SUITES["pipeline"][:14],
    "tensor": SUITES["tensor"],
}


def measured(world: World, task: Task) -> list[Record]:
    return measure(task)


def rows_of(suite: str, names: tuple[str, ...]) -> dict[str, table.Line]:
    """The rows of two ranks, by contender; all that can run have the loss of the first of SAME."""
    task = replace(TASK, contenders=names)
    if suite == "pipeline":  # of two stages on each rank
        task = replace(task, rows=8, config=replace(MICRO, layers=4))
    rows = {row.contender: row for row in table.lines(task, run_gloo(2, measured, task))}
    assert tuple(rows) == names
    loss = rows[SAME[suite][0]].loss
    assert loss is not None
    for name in {*names} & {*SAME[suite]}:
        row = rows[name]
        refused = suite == "tensor" and row.note.startswith("InputError: ")
        if row.loss is None and (refused or name.startswith("DeepSpeed")):
            assert row.note  # it is not installed, or its operators cannot be built
            continue
        assert row.loss == pytest.approx(loss, rel=1e-2 if "delayed" in name else 1e-5), row
        assert row.step_s and row.ratio
    return rows


KEYS = [
    *("size", "contender", "ranks", "step_s", "ratio"),
    *("wire_bytes", "wire_ratio", "peak_bytes", "buffers_bytes", "loss", "note"),
    *("host_bytes", "disk_bytes", "moved_bytes"),
]


def test_data() -> None:
    """Bytes over their ratio are the least, states fit in the peak; JSON has the keys agreed."""
    rows = rows_of("data", (REFERENCE, "ddp", "zero3"))
    assert rows[REFERENCE].ratio == 1.0
    for name, row in rows.items():
        assert row.note == "" or row.note.endswith("after its time was taken")
        assert row.wire_bytes is not None and row.wire_ratio is not None
        least = least_bytes(ROSTER[name].row, TASK, 2)
        assert row.wire_bytes / row.wire_ratio == pytest.approx(least, rel=1e-3)
    peak, sharded = rows["ddp"].peak_bytes, rows["zero3"].peak_bytes
    assert peak is not None and peak > 12 * MICRO.parameters  # fp32 weights and two moments
    assert sharded is not None and sharded < peak
    printed = json.loads(json.dumps(table.as_json([*rows.values()])))
    assert all(list(row) == KEYS for row in printed["rows"])


@pytest.mark.full
@pytest.mark.parametrize("suite", SAME)
def test_suites(suite: str) -> None:
    """All contenders that can run have one loss; what is on the host or a disk has its bytes."""
    for name, row in rows_of(suite, SAME[suite]).items():
        assert row.loss or not name.startswith("torch")
        assert "offload:" not in name or (row.host_bytes and row.moved_bytes)
        assert bool(row.disk_bytes) == ("@disk" in name)


def broken(model: torch.nn.Module, setup: Setup) -> Loop:
    raise ValueError("on this rank and on that")


def measured_with_a_failure(world: World, task: Task) -> list[Record]:
    """One contender fails where it is built, and another after a few steps on rank 1 alone."""
    steps = itertools.count()

    def step(batch: Any) -> float:
        if next(steps) > 1 and world.rank == 1:
            raise RuntimeError("no more")
        return 1.0

    added = {
        "broken": Contender("broken", "ddp", broken),
        "tired": Contender("tired", "ddp", lambda _model, _setup: Loop(step)),
        "absent": Contender("absent", "ddp", broken, package="no_such_package_here"),
    }
    with patch.dict(ROSTER, added):
        return measure(task)


def test_a_missing_or_failing_contender_is_a_note() -> None:
    """Who is not installed, cannot be built, or fails on one rank leaves a note, and is out."""
    notes = {
        "broken": "ValueError: on this rank and on that",
        "tired": "RuntimeError: no more",
        "absent": "no_such_package_here is not installed",
    }
    task = replace(TASK, contenders=(REFERENCE, *notes))
    found = table.lines(task, run_gloo(2, measured_with_a_failure, task))
    assert {r.contender: r.note for r in found if r.step_s is None} == notes
    assert found[0].ratio == 1.0 and "absent" in table.as_text(found)


COUNT = 4 * 32 * 32


def on_disk(world: World, folder: str) -> list[disk.DiskLine]:
    return disk.compare(world, folder, COUNT, rounds=2, file_bytes=2**20)


def test_other_comparisons(tmp_path: Path) -> None:
    """One rank beside the plain loop; a disk in a step and alone; saves beside none."""
    line = compare(Pair("micro", MICRO, "fp32", "zero3", rows=4, rounds=2, device="cpu"))
    assert line.loss == pytest.approx(line.plain_loss, rel=1e-6)
    assert line.predicted_bytes == 16 * MICRO.parameters <= line.state_bytes
    rows, others = run_gloo(2, on_disk, str(tmp_path))
    assert rows == others and [row.plan.split()[-1] for row in rows] == list(disk.WORDS)
    for row in rows:
        assert row.written_bytes == 16 * COUNT  # the gradient, the master and two moments
        assert 0 < row.waited_s + row.updated_s <= row.step_s
        assert min(row.read_share, row.write_share, row.step_share) > 0
    assert list(tmp_path.iterdir()) == []
    (saved, _) = run_gloo(2, async_save.compare, str(tmp_path), COUNT, 2, 2)
    assert min(saved.step_s, saved.ratio, saved.held_s, saved.write_s) > 0
    assert find(tmp_path).name == "step-000007" and "dp2 zero3" in async_save.as_text([saved])


MEDIANS = Task("micro", MICRO, (REFERENCE, "zero1"), rows=4, rounds=3)
PROGRAM = "python -m benchmarks "


def test_medians_are_of_the_slowest_rank_and_of_rounds() -> None:
    """A round's time is its slowest rank's; the ratio is the median of the rounds' ratios."""
    reference = Record(REFERENCE, [1.0, 2.0, 4.0], [8.0] * 3, [0.0] * 3, 10, 2.0)
    sent, moved = [100.0 * table.MIB] * 3, [50.0 * table.MIB] * 3
    ranks = [
        [reference, Record("zero1", [1.0, 1.0, 1.0], sent, moved, 20, 1.0)],
        [reference, Record("zero1", [2.0, 1.0, 3.0], [3 * one for one in sent], moved, 30, 3.0)],
    ]
    line = table.lines(MEDIANS, ranks)[1]
    assert (line.step_s, line.ratio, line.wire_bytes) == (2.0, 0.75, 200 * table.MIB)
    assert (line.peak_bytes, line.loss) == (30, 2.0)
    assert line.note == "50.0 MiB moved after its time was taken"
    # of two pairs in one run each is held against its own first
    times = {"torch 1f1b:4": 2.0, "1f1b:4": 1.0, "torch zb-v:4": 4.0, "zb-v:4": 3.0}
    task = replace(MEDIANS, contenders=tuple(times), rounds=1)
    records = [Record(name, [step_s], [0.0], [0.0], 0, 1.0) for name, step_s in times.items()]
    assert [line.ratio for line in table.lines(task, [records])] == [1.0, 0.5, 1.0, 0.75]


def test_the_least_bytes_are_the_papers() -> None:
    """2Ψ(n-1)/n in fp32, and 3Ψ(n-1)/n for zero3; 4L + 2 all-reduces of activations for `tp`."""
    for row, volume in {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3}.items():
        assert least_bytes(row, MEDIANS, 4) == volume * MICRO.parameters * 4 * 3 // 4
    tokens, width, layers = MEDIANS.rows * MICRO.sequence, MICRO.hidden_size, MICRO.layers
    numel = (4 * layers + 2) * tokens * width + 3 * tokens
    for ranks in (2, 4):
        share = (ranks - 1) / ranks * 4
        assert least_bytes("tp", MEDIANS, ranks) == 2 * numel * share
        norms = 2 * (2 * layers + 1) * width  # with `sp` their gradients too
        assert least_bytes("tp sp", MEDIANS, ranks) == (2 * numel + norms) * share


@pytest.mark.cases(9)
@pytest.mark.parametrize(
    ("words", "options", "phrase"),
    [
        (["nothing"], {}, "Write instead: python -m benchmarks data"),
        (["tensors"], {}, "python -m benchmarks tensor"),
        (["data", "nobody"], {}, "torch DDP"),
        (["data"], {"nproc": 0}, "Write instead: --nproc 2"),
        (["data"], {"device": "tpu"}, "Write instead: --device cpu"),
        (["data", "zero3"], {"device": "cuda"}, "python -m benchmarks data --device cuda"),
        (["data"], {"size": ["tiny"], "device": "cuda"}, "one rank on its own models"),
        (["save"], {"size": ["small"]}, "--size 1M"),
        (["save", "fsdp2"], {}, "python -m benchmarks save"),
        (["disk", "/none"], {}, "python -m benchmarks disk ."),
    ],
)
def test_bad_input_is_refused(words: list[str], options: dict, phrase: str) -> None:
    """The paragraph says what is wrong and what to write instead."""
    with pytest.raises(InputError, match=phrase):
        bench_command(words, **options)


def test_the_commands_of_the_results_are_those_of_the_program() -> None:
    """Each suite exists, and each option is accepted by the parser."""
    app = typer.Typer()
    app.command()(bench_command)
    parser = typer.main.get_command(app)
    files = (ROOT / "benchmarks/results").glob("*.toml")
    runs = [run for file in files for run in tomllib.loads(file.read_text()).get("run", ())]
    commands = [line.strip() for run in runs for line in run["command"].split(";")]
    lines = [line for line in commands if line.startswith(PROGRAM)]
    assert len(lines) > 20
    for line in lines:
        argv = shlex.split(line.removeprefix(PROGRAM))
        assert argv[0] in {*SUITES, "disk", "host", "save"}, line
        parser.make_context("benchmarks", argv)
