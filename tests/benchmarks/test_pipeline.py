"""The suite `pipeline` on a model of no size: pairs of one schedule, the cut, the least bytes."""

from dataclasses import replace

import pytest
import torch

from benchmarks import suite, table
from benchmarks.contenders.contender import Task
from benchmarks.contenders.ours import SCHEDULES
from benchmarks.contenders.roster import ROSTER, SUITES, choose
from benchmarks.contenders.torch_pipeline import part
from benchmarks.halves import halves, stage_starts
from benchmarks.least import least_bytes
from benchmarks.measure import Record, measure
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.models.gpt import GPT, SIZES, GPTConfig
from shardwise.models.registry import of_gpt
from tests.pool import run_gloo

MICRO = GPTConfig(vocabulary=64, layers=2, width=32, heads=4, kv_heads=2, hidden=48, sequence=8)
TASK = Task("micro", MICRO, SUITES["pipeline"][:14], rounds=1, warm_up=1)


def measured(world: World, task: Task) -> list[Record]:
    return measure(task)


@pytest.mark.full
def test_everyone_trains_the_same_model() -> None:
    """Torch's seven schedules and ours, four stages of half a layer among them, have one loss."""
    rows = table.lines(TASK, run_gloo(2, measured, TASK))
    assert [row.contender for row in rows] == list(TASK.contenders)
    assert [row.note for row in rows if row.step_s is None] == []
    for row in rows:
        assert row.loss == pytest.approx(rows[0].loss, rel=1e-5)
        assert row.ratio == 1.0 or not row.contender.startswith("torch")


@pytest.mark.full
def test_what_a_rank_forbids_is_a_line() -> None:
    """Four microbatches do not fill DualPipe-V on four ranks: both say so, and others go on."""
    names = ("torch dualpipe-v:4", "dualpipe-v:4", "torch 1f1b:8", "1f1b:8")
    task = replace(TASK, contenders=names)
    rows = table.lines(task, run_gloo(4, measured, task))
    assert all("4 microbatches for DualPipe-V on 4 ranks" in row.note for row in rows[:2])
    assert [row.step_s is None for row in rows] == [True, True, False, False]
    assert rows[3].loss == pytest.approx(rows[2].loss, rel=1e-5)


def test_a_ratio_is_to_the_same_schedule() -> None:
    """Of two pairs in one run each is held against its own first, round by round."""
    times = {"torch 1f1b:4": 2.0, "1f1b:4": 1.0, "torch zb-v:4": 4.0, "zb-v:4": 3.0}
    task = replace(TASK, contenders=tuple(times))
    records = [Record(name, [step_s], [0.0], [0.0], 0, 1.0) for name, step_s in times.items()]
    assert [line.ratio for line in table.lines(task, [records])] == [1.0, 0.5, 1.0, 0.75]


def test_the_parts_are_the_model() -> None:
    """Torch's stages one after another give the model's own logits, for every number of them."""
    trainable = of_gpt("micro", MICRO)
    model, tokens = trainable.build(), trainable.batch(2, 0)["inputs"]
    assert isinstance(model, GPT)
    whole = model(tokens)
    for stages in range(1, 2 * MICRO.layers + 1):
        x = tokens
        for stage in range(stages):
            x = part(model, stage, stages)(x)
        assert torch.equal(x, whole)


def test_more_stages_than_layers_cut_layers_in_half() -> None:
    """Two stages begin with whole blocks, four with halves, five are refused."""
    model = of_gpt("micro", MICRO).build()
    assert isinstance(model, GPT)
    assert stage_starts(model, 2) == ("blocks.1",)
    assert stage_starts(model, 4) == ("blocks.0.mlp_norm", "blocks.1", "blocks.1.mlp_norm")
    assert len(halves(MICRO)) == 4
    with pytest.raises(InputError, match="at most 4, half a layer each"):
        stage_starts(model, 5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_least_bytes_are_the_boundaries(ranks: int) -> None:
    """The stream forward and back over every boundary between ranks, whatever the microbatches."""
    numel = TASK.rows * MICRO.sequence * MICRO.width
    loops, turns = 2 * ranks - 1, 2 * ranks - 2
    crossings = {"interleaved": loops, "bfs": loops, "zb-v": turns, "dualpipe-v": turns}
    for word in (word for word in SCHEDULES if ":8" in word):
        many = crossings.get(word.partition(":")[0], ranks - 1)
        assert least_bytes(word, TASK, ranks) == 2 * numel * many * 4 // ranks


def test_a_reference_runs_with_whom_it_is_for() -> None:
    """A word names a schedule with 4 and 8 microbatches, and each brings torch's; no other runs."""
    assert choose("pipeline", ["1f1b"]) == ("torch 1f1b:4", "1f1b:4", "torch 1f1b:8", "1f1b:8")
    assert choose("pipeline", ["zbv-4"]) == ("torch zb-v:4", "zb-v:4")
    assert choose("pipeline", []) == SUITES["pipeline"]
    with pytest.raises(InputError, match='benchmarks pipeline "gpipe:4"'):
        choose("pipeline", ["gpip:4"])
    pairs = suite.plan_tasks("pipeline", ["tiny"], 2, None, [])
    assert [task.contenders for task in pairs] == [(f"torch {word}", word) for word in SCHEDULES]
    assert all(ROSTER[task.reference].against == task.reference for task in pairs)


@pytest.mark.parametrize(
    ("word", "ranks", "says"),
    [
        ("1f1b:4", 1, "--nproc 2"),
        ("dualpipe-v:4", 4, "from 8 up"),
        ("interleaved:4", 3, "multiples of 3"),
        ("zb-v:8", 5, "at most 8, half a layer each"),
    ],
)
def test_ranks_that_a_schedule_forbids_are_refused(word: str, ranks: int, says: str) -> None:
    """Before any process starts, with what is allowed; three ranks may well have 1F1B."""
    with pytest.raises(InputError, match=says):
        suite.plan_tasks("pipeline", ["tiny"], ranks, None, [word])
    assert suite.plan_tasks("pipeline", ["tiny"], 3, None, ["1f1b:4"])
    assert SIZES["tiny"].layers == 4
