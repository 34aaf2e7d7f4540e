"""The parts of the benchmarks: least bytes, live bytes, medians, choices, and what is refused."""

import shlex
import tomllib
from dataclasses import replace

import pytest
import typer

from benchmarks import suite, table
from benchmarks.__main__ import bench_command
from benchmarks.contenders.contender import Task
from benchmarks.contenders.ours import SCHEDULES
from benchmarks.contenders.roster import ROSTER, SUITES, choose
from benchmarks.measure import Record
from benchmarks.table import least_bytes
from shardwise.core.errors import InputError
from shardwise.core.zero import ROWS
from shardwise.models.gpt import GPTConfig
from tests.house import ROOT

MICRO = GPTConfig(vocabulary=64, layers=2, width=32, heads=4, kv_heads=2, hidden=48, sequence=8)
REFERENCE = SUITES["data"][0]
TASK = Task("micro", MICRO, (REFERENCE, "zero1"), rows=4, rounds=3)
PROGRAM = "python -m benchmarks "


def test_medians_are_of_the_slowest_rank_and_of_rounds() -> None:
    """A round's time is its slowest rank's; the ratio is the median of the rounds' ratios."""
    reference = Record(REFERENCE, [1.0, 2.0, 4.0], [8.0] * 3, [0.0] * 3, 10, 2.0)
    sent, moved = [100.0 * table.MIB] * 3, [50.0 * table.MIB] * 3
    ranks = [
        [reference, Record("zero1", [1.0, 1.0, 1.0], sent, moved, 20, 1.0)],
        [reference, Record("zero1", [2.0, 1.0, 3.0], [3 * one for one in sent], moved, 30, 3.0)],
    ]
    line = table.lines(TASK, ranks)[1]
    assert (line.step_s, line.ratio, line.wire_bytes) == (2.0, 0.75, 200 * table.MIB)
    assert (line.peak_bytes, line.loss) == (30, 2.0)
    assert line.note == "50.0 MiB moved after its time was taken"
    # of two pairs in one run each is held against its own first
    times = {"torch 1f1b:4": 2.0, "1f1b:4": 1.0, "torch zb-v:4": 4.0, "zb-v:4": 3.0}
    task = replace(TASK, contenders=tuple(times), rounds=1)
    records = [Record(name, [step_s], [0.0], [0.0], 0, 1.0) for name, step_s in times.items()]
    assert [line.ratio for line in table.lines(task, [records])] == [1.0, 0.5, 1.0, 0.75]


def test_the_least_bytes_are_the_papers() -> None:
    """2Ψ(n-1)/n in fp32, and 3Ψ(n-1)/n for zero3; 4L + 2 all-reduces of activations for `tp`."""
    for row, volume in {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3}.items():
        assert least_bytes(row, TASK, 4) == volume * MICRO.parameters * 4 * 3 // 4
    tokens, width, layers = TASK.rows * MICRO.sequence, MICRO.width, MICRO.layers
    numel = (4 * layers + 2) * tokens * width + 3 * tokens
    for ranks in (2, 4):
        share = (ranks - 1) / ranks * 4
        assert least_bytes("tp", TASK, ranks) == 2 * numel * share
        norms = 2 * (2 * layers + 1) * width  # with `sp` their gradients too
        assert least_bytes("tp sp", TASK, ranks) == (2 * numel + norms) * share


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_least_bytes_of_a_pipeline_are_the_boundaries(ranks: int) -> None:
    """The stream forward and back over every boundary between ranks, whatever the microbatches."""
    numel = TASK.rows * MICRO.sequence * MICRO.width
    loops, turns = 2 * ranks - 1, 2 * ranks - 2
    crossings = {"interleaved": loops, "bfs": loops, "zb-v": turns, "dualpipe-v": turns}
    for word in (word for word in SCHEDULES if ":8" in word):
        many = crossings.get(word.partition(":")[0], ranks - 1)
        assert least_bytes(word, TASK, ranks) == 2 * numel * many * 4 // ranks


def test_contenders_are_found_by_the_beginning_of_their_names() -> None:
    """Capitals and spaces do not count; the reference always runs; none means all."""
    assert choose("data", []) == SUITES["data"]
    deepspeed = ("DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3")
    assert choose("data", ["zero1", "deepspeed"]) == ("torch DDP", *deepspeed, "zero1")
    assert choose("data", ["fsdp2-without-reshard"]) == ("torch DDP", "FSDP2 without reshard")
    full = ("zero3 recompute:full", "zero3 recompute:full arenas")
    assert choose("memory", ["zero3-recompute:f"]) == ("zero3", *full)
    assert choose("tensor", ["tp-sp"]) == ("torch TP", "tp sp")
    assert not {*SUITES["tensor"]} & {*ROWS}
    assert choose("pipeline", ["1f1b"]) == ("torch 1f1b:4", "1f1b:4", "torch 1f1b:8", "1f1b:8")
    assert choose("pipeline", ["zbv-4"]) == ("torch zb-v:4", "zb-v:4")
    pairs = suite.plan_tasks("pipeline", ["tiny"], 2, None, [])
    assert [task.contenders for task in pairs] == [(f"torch {word}", word) for word in SCHEDULES]
    assert all(ROSTER[task.reference].against == task.reference for task in pairs)
    (mixtures,) = suite.plan_tasks("experts", (), 2, None, ())  # not of 64 experts
    assert (mixtures.size, mixtures.contenders) == ("tiny", SUITES["experts"])
    assert suite.plan_tasks("pipeline", ["tiny"], 3, None, ["1f1b:4"])
    with pytest.raises(InputError, match='benchmarks data "zero3"'):
        choose("data", ["zero4"])


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
