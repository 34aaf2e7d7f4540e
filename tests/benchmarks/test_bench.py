"""The benchmark's machinery on a model of no size: what it measures adds up."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from benchmarks import link, suite, table
from benchmarks.contenders.contender import Contender, Loop, Setup, Task
from benchmarks.contenders.roster import ROSTER, SUITES, choose
from benchmarks.cuda import Pair, compare
from benchmarks.least import least_bytes
from benchmarks.measure import Record, measure
from benchmarks.meters.interface import sent_bytes
from benchmarks.meters.live_bytes import LiveBytes
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.core.zero import ROWS
from shardwise.models.gpt import GPTConfig, parameters
from tests.pool import run_gloo

MICRO = GPTConfig(vocabulary=64, layers=2, width=32, heads=2, kv_heads=2, hidden=48, sequence=8)
REFERENCE = SUITES["data"][0]
NAMES = (REFERENCE, "FSDP2", "DeepSpeed ZeRO-1", *ROWS)
TASK = Task("micro", MICRO, NAMES, rows=4, rounds=2, steps=2, warm_up=1)
KEYS = [
    *("size", "contender", "ranks", "step_s", "ratio"),
    *("wire_bytes", "wire_ratio", "peak_bytes", "buffers_bytes", "loss", "note"),
    *("host_bytes", "disk_bytes", "moved_bytes"),
]


def measured(world: World, task: Task) -> list[Record]:
    return measure(task)


def break_down(model: torch.nn.Module, setup: Setup) -> Loop:
    raise ValueError("on this rank and on that")


def measured_with_a_failure(world: World, task: Task) -> list[Record]:
    """One contender fails where it is built, and another after a few steps on rank 1 alone."""
    calls: list[int] = []

    def step(batch: Any) -> float:
        calls.append(1)
        if len(calls) > 3 and world.rank == 1:
            raise RuntimeError("no more")
        return 1.0

    added = {
        "broken": Contender("broken", "ddp", break_down),
        "tired": Contender("tired", "ddp", lambda _model, _setup: Loop(step)),
        "absent": Contender("absent", "ddp", break_down, package="no_such_package_here"),
    }
    ROSTER.update(added)
    try:
        return measure(task)
    finally:
        for name in added:
            del ROSTER[name]


@pytest.fixture(scope="module")
def by_rank() -> list[list[Record]]:
    return run_gloo(2, measured, TASK)


@pytest.mark.full
def test_the_json_has_the_agreed_keys(by_rank: list[list[Record]]) -> None:
    """One object, `rows`, a row for each contender with the keys of the agreement, in order."""
    printed = json.loads(json.dumps(table.as_json(table.lines(TASK, by_rank))))
    assert list(printed) == ["rows"]
    assert [row["contender"] for row in printed["rows"]] == list(NAMES)
    assert all(list(row) == KEYS for row in printed["rows"])


@pytest.mark.full
def test_everyone_trains_the_same_model(by_rank: list[list[Record]]) -> None:
    """After as many steps from the same weights on the same data, the losses agree."""
    rows = {row.contender: row for row in table.lines(TASK, by_rank)}
    for name in (REFERENCE, "FSDP2", *ROWS):
        # what else uses the interface may be noted; a contender that failed has no loss
        assert rows[name].note == "" or rows[name].note.endswith("after its time was taken")
        assert rows[name].loss == pytest.approx(rows[REFERENCE].loss, rel=1e-5)


def test_the_numbers_of_a_row_are_consistent(by_rank: list[list[Record]]) -> None:
    """DDP's ratio to itself is 1; bytes over the ratio are the least; states fit in the peak."""
    rows = {row.contender: row for row in table.lines(TASK, by_rank)}
    assert rows[REFERENCE].ratio == 1.0
    for name in (REFERENCE, "FSDP2", *ROWS):
        row = rows[name]
        assert row.step_s is not None and row.step_s > 0
        assert row.wire_bytes is not None and row.wire_ratio is not None
        least = least_bytes(ROSTER[name].row, TASK, 2)
        assert row.wire_bytes / row.wire_ratio == pytest.approx(least, rel=1e-3)
    states = 12 * parameters(MICRO)  # fp32 weights and two moments
    peak = rows["ddp"].peak_bytes
    assert peak is not None and peak > states
    assert rows["zero3"].peak_bytes is not None and rows["zero3"].peak_bytes < peak


def test_a_missing_or_failing_contender_is_a_note() -> None:
    """Who is not installed, cannot be built, or fails on one rank leaves a note, and is out."""
    names = (REFERENCE, "broken", "tired", "absent")
    task = replace(TASK, contenders=names)
    found = table.lines(task, run_gloo(2, measured_with_a_failure, task))
    rows = {row.contender: row for row in found}
    assert rows["broken"].note == "ValueError: on this rank and on that"
    assert rows["tired"].note == "RuntimeError: no more"
    assert rows["absent"].note == "no_such_package_here is not installed"
    assert all(rows[name].step_s is None for name in names[1:])
    assert rows[REFERENCE].ratio == 1.0
    assert "absent" in table.as_text(found)


def test_medians_are_of_the_slowest_rank_and_of_rounds() -> None:
    """A round's time is its slowest rank's; the ratio is the median of the rounds' ratios."""
    task = replace(TASK, contenders=(REFERENCE, "zero1"), rounds=3)
    ranks = [
        [Record(REFERENCE, [1.0, 2.0, 4.0], [8.0] * 3, [0.0] * 3, 10, 2.0), row]
        for row in (
            Record(
                "zero1", [1.0, 1.0, 1.0], [100.0 * table.MIB] * 3, [50.0 * table.MIB] * 3, 20, 1.0
            ),
            Record(
                "zero1", [2.0, 1.0, 3.0], [300.0 * table.MIB] * 3, [50.0 * table.MIB] * 3, 30, 3.0
            ),
        )
    ]
    line = table.lines(task, ranks)[1]
    assert (line.step_s, line.ratio, line.wire_bytes) == (2.0, 0.75, 200 * table.MIB)
    assert (line.peak_bytes, line.loss) == (30, 2.0)
    assert line.note == "50.0 MiB moved after its time was taken"


@pytest.mark.parametrize(("row", "volume"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3)])
def test_the_least_bytes_are_the_tables(row: str, volume: int) -> None:
    """The least a rank sends is 2Ψ(n-1)/n in fp32, and 3Ψ(n-1)/n for zero3."""
    assert least_bytes(row, TASK, 4) == volume * parameters(MICRO) * 4 * 3 // 4


def test_live_bytes_follow_storages() -> None:
    """A storage is counted once, at the size it has now, no longer than it lives; meta is none."""
    live = LiveBytes()
    with live:
        shape = torch.zeros(1000, device="meta")
        assert live.bytes() == 0
        kept = torch.zeros(1000)
        view = kept.view(10, 100)[3:]
        assert live.bytes() == 4000
        passing = torch.ones(500) + 1
        assert live.bytes() == 6000
        del passing
        kept.untyped_storage().resize_(400)
    assert live.bytes() == 400
    assert live.peak_bytes == 8000  # the ones, and one more than they
    del kept, view, shape
    assert live.bytes() == 0


def test_contenders_are_found_by_the_beginning_of_their_names() -> None:
    """Capitals and spaces do not count; torch DDP always runs; none means all."""
    assert choose("data", []) == SUITES["data"]
    assert choose("data", ["zero1", "deepspeed"]) == (
        *("torch DDP", "DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3", "zero1"),
    )
    assert choose("data", ["fsdp2-without-reshard"]) == ("torch DDP", "FSDP2 without reshard")
    full = ("zero3 recompute:full", "zero3 recompute:full arenas")
    assert choose("memory", ["zero3-recompute:f"]) == ("zero3", *full)
    with pytest.raises(InputError, match='benchmarks data "zero3"'):
        choose("data", ["zero4"])


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        ((["smal"], 2, None, []), "--size small"),
        (([], 1, None, []), "--nproc 2"),
        (([], 3, None, []), "--nproc 2"),
        ((["tiny"], 2, 0, []), "--repeats 5"),
        ((["tiny"], 2, 10**12, []), "--repeats 5"),
    ],
)
def test_runs_that_cannot_be_are_refused(arguments: Any, instead: str) -> None:
    """A size, a world or a number of repeats that cannot work is answered before any starts."""
    with pytest.raises(InputError, match=instead):
        suite.plan_tasks("data", *arguments)


def test_an_interface_that_is_not_there_is_named() -> None:
    """The counters say which interfaces there are."""
    assert sent_bytes("lo") >= 0
    with pytest.raises(InputError, match="lo"):
        sent_bytes("nothing0")


def test_a_host_that_cannot_be_made_is_told() -> None:
    """A rate tc does not know is refused; the lines that make the hosts are all for the two."""
    with pytest.raises(InputError, match="--link 1gbit"), link.hosts("fast"):
        pass
    lines = link.commands(("a", "b"), "1gbit")
    assert lines[0] == "ip netns add a"
    assert sum("tbf rate 1gbit" in line for line in lines) == 2


def test_on_one_rank_the_engine_is_the_plain_loop() -> None:
    """The comparison made on a GPU, made here: same loss, states as the formula says."""
    line = compare(Pair("micro", MICRO, "fp32", "zero3", rows=4, rounds=2, device="cpu"))
    assert line.loss == pytest.approx(line.plain_loss, rel=1e-6)
    assert line.predicted_bytes == 16 * parameters(MICRO)
    tensors = 9 * MICRO.layers + 3  # each with a step count of 4 bytes at most
    assert 0 <= line.state_bytes - line.predicted_bytes <= 4 * tensors
    assert line.ratio > 0 and line.mfu > 0
    assert set(asdict(line)) > {"ratio", "mfu", "state_bytes", "predicted_bytes"}
