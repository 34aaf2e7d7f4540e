"""Offload: on which thread and when states are updated, few units on the device at once; states on
a disk, which may be slow or fail; a bound on a device's memory, and what fits it.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.tiers.disk import DiskError
from shardwise.comm.tiers.tiers import Tiers
from shardwise.comm.world import World, alone
from shardwise.core.buffer_sizes import reserved_bytes
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.engine.checks.device_room import with_offload
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer.optimizer import ShardedOptimizer
from shardwise.engine.predict import predict
from shardwise.flat.flat_parameter import Flat
from shardwise.observe.meter import Meter
from shardwise.prediction.prediction import Prediction
from shardwise.techniques.data import apply as shard
from tests.engine.cases import (
    Case,
    Task,
    build,
    oracle,
    ranks_of,
    rows_task,
    settled,
    share,
    squares,
    tied_gpt,
    vectors,
)
from tests.engine.loops import rows
from tests.engine.pipelines import task as layers
from tests.engine.tensors import Held, assert_parity, holds, mine
from tests.engine.zoo import dims
from tests.pool import run_threads

TASK = Task()


def step_of(engine: Engine, step: int) -> Any:
    return engine.step(mine(engine, TASK.batch(step)))


# --- the host's thread ----------------------------------------------------------------------------


def in_parts(world: World, words: str) -> tuple[list[bool], Held]:
    """Steps without clipping in which units of 4 KiB are updated at once, and their updates."""
    engine, held, updates = build(world, TASK, Case(words)), Held(), []
    engine.optimizer.early_bytes = 4096
    step = engine.optimizer.torch.step

    def noted(*args: Any) -> Any:
        updates.append(get_ident())
        return step(*args)

    engine.optimizer.torch.step = noted  # type: ignore[method-assign]
    for k in range(3):
        held.step(engine, mine(engine, TASK.batch(k)))
    return [get_ident() == thread for thread in updates], held.ended(engine)


def set_slowly(flat: Flat, data: Sequence[Tensor], set_quickly: Any = Flat._set) -> None:
    """As Flat._set; in between, a thread that updates could take the pieces for assigned ones."""
    for p, tensor in zip(flat.params, data, strict=True):
        p.data = tensor
    time.sleep(0.01)
    set_quickly(flat, data)


@pytest.mark.parametrize(
    "plan",
    [
        *("dp2 zero1 offload:optim", "dp2 zero2 offload:optim"),
        "dp2 zero3 accumulate:2 offload:param",
    ],
)
def test_several_updates_of_a_step_run_beside_arrivals(plan: str, monkeypatch: pytest.MonkeyPatch):
    """In parts of 4 KiB on the host's thread, while the main thread makes the next pieces."""
    monkeypatch.setattr(Flat, "_set", set_slowly)
    case = Case(f"{plan} fp64")
    found = run_threads(2, in_parts, case.plan)
    for here, _ in found:
        assert len(here) >= 3 * 3
        assert not any(here)
    assert_parity([held for _, held in found], oracle(TASK, case), 1e-10)


def failing(plan: str) -> None:
    """Steps of an optimizer whose second update fails, to the end of what waits."""
    engine = build(alone(), TASK, Case(plan))
    step_of(engine, 0)
    engine.wait()

    def fail(*_: Any) -> None:
        raise ValueError("no such state")

    engine.optimizer.torch.step = fail  # type: ignore[method-assign]
    step_of(engine, 1)
    engine.flush()


@pytest.mark.parametrize("word", ["optim", "optim-delayed=0"])
def test_an_error_of_an_update_on_the_hosts_thread_is_raised(word: str):
    """It ends the step, or the one in which the update is awaited."""
    with pytest.raises(ValueError, match="no such state"):
        failing(f"fp64 offload:{word}")


# --- the device -----------------------------------------------------------------------------------


def measured(world: World, plan: str, what: str) -> tuple[int, list[int], int, int]:
    """Of the last of three steps the most bytes of a category on the device, beside units' bytes.
    What rests there, and how much the optimizer's host memory grew.
    """
    engine = build(world, TASK, Case(plan))
    meter = Meter(engine)
    for step in range(3):
        with meter:
            step_of(engine, step)
    units = [
        sum(group.plan.padded * group.shard.element_size() for group in unit.groups)
        for unit in engine.data.units.order
    ]
    growth = meter.most["optimizer", "host"] - engine.host_memory()["optimizer"]
    rests = engine.memory()[what]
    return meter.most[what, "device"], units, rests, growth


FEW = [(f"{plan} fp32 offload:param", "parameters", 3) for plan in ("dp1", "dp2 zero3")]
FEW += [(f"dp2 {row} fp32 offload:optim", "gradients", 4) for row in ("ddp", "zero1", "zero2")]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("plan", "what", "most_units"), FEW)
def test_the_device_has_few_units_at_once(plan: str, what: str, most_units: int):
    """Gradients of at most four units, or three units' parameters; a step leaves nothing there."""
    for most, units, rests, growth in run_threads(ranks_of(plan), measured, plan, what):
        assert 0 < most <= sum(sorted(units)[-most_units:]) < sum(units)
        assert (rests, growth) == (0, 0)


@pytest.mark.parametrize("plan", ["offload:param", "dp2 zero3 offload:param", "tp2 offload:param"])
def test_weights_go_to_the_device_unit_by_unit(plan: str, monkeypatch: pytest.MonkeyPatch):
    """Real weights stay where the program made them until their unit is laid out."""

    def cast(model: nn.Module, dtype: Any, _: Any, fill: Any = None, **options: Any) -> None:
        shard.cast_whole(model, dtype, torch.device("meta"), fill, **options)
        assert not any(p.is_meta for p in model.parameters())  # none has gone there

    def loss(world: World) -> float:
        return step_of(build(world, TASK, Case(f"{plan} fp64")), 0).loss

    want = run_threads(ranks_of(plan), loss)
    monkeypatch.setattr("shardwise.engine.engine.cast_whole", cast)
    assert run_threads(ranks_of(plan), loss) == want


# --- updates that are one step late ---------------------------------------------------------------


def test_states_are_read_after_the_update_beside_the_step(monkeypatch: pytest.MonkeyPatch):
    """A delayed update still runs when the program reads its states, which are those after it."""
    real = ShardedOptimizer._update
    monkeypatch.setattr(ShardedOptimizer, "_update", lambda *of: (time.sleep(0.05), real(*of)))
    plan, model = "offload:optim-delayed=0 fp64", settled(nn.Linear(6, 6))
    engine = sw.parallelize(model, plan, alone(), optimizer=sw.AdamW(lr=0.1), loss=squares)
    for step in range(3):
        engine.step(rows(step, 0))
        assert engine.optimizer.state[model.get_parameter("weight")]["step"].item() == step + 1


# --- a disk ---------------------------------------------------------------------------------------


def slow_down(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> list[str]:
    """Delay each read and write of a file; return a list that gets the name of each."""
    made = list[str]()

    def slow(name: str, real: Any, *given: Any) -> int:
        made.append(name)
        time.sleep(delay_s)
        return real(*given)

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, partial(slow, name, getattr(os, name)))
    return made


@pytest.mark.parametrize("words", ["offload:optim@disk", "offload:param@disk"])
def test_a_checkpoint_while_the_disk_writes(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Saving and `sw.full_state_dict` wait for the disk; a parameter without dims is loaded too."""
    x, _ = vectors(0)
    options: dict[str, Any] = {"loss": squares, "least_unit_bytes": 1}
    plain, engine, again = (
        sw.parallelize(
            dims(),
            f"{plan} fp64",
            alone(),
            optimizer=sw.AdamW(lr=1e-2),
            offload_folder=str(tmp_path),
            **options,
        )
        for plan in ("", words, words)
    )
    slow_down(monkeypatch, 0.01)
    assert [plain.step(x).loss for _ in range(2)] == [engine.step(x).loss for _ in range(2)]
    wanted, found = (sw.full_state_dict(each) for each in (plain, engine))
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    sw.save(engine, tmp_path / "saved")
    sw.load(again, tmp_path / "saved")
    assert [again.step(x).loss for _ in range(3)] == [plain.step(x).loss for _ in range(3)]


PAGE_BYTES = 4096


def wide(width: int) -> nn.Module:
    return settled(nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)))


def wide_task(width: int) -> Task:
    return rows_task(partial(wide, width), partial(vectors, rows=6, width=8))


def waiting(world: World, width: int, plan: str) -> tuple[Held, int]:
    """A training, and the bytes in host memory."""
    task = wide_task(width)
    engine, held = build(world, task, Case(plan, clip=0.5)), Held()
    meter, disk = Meter(engine), engine.disk
    assert disk is not None
    peaks = list[int]()
    for step in range(3):
        with meter:
            metrics = engine.step(mine(engine, task.batch(step)))
        held.note(engine, metrics)
        peaks.append(sum(n for (_, tier), n in meter.most.items() if tier == "host"))
    disk.sync()
    assert disk.free == disk.buffers - 1  # the one that widens gradients is kept
    unused_bytes = os.fstat(disk.file).st_size - sum(engine.disk_memory().values())
    assert 0 <= unused_bytes < PAGE_BYTES * len(disk.extents)
    held.ended(engine)
    on_host = sum(engine.host_memory().values())
    assert sum(engine.disk_memory().values()) >= 4 * on_host
    assert max(peaks[1:]) <= on_host + 2 * COUNTS  # in the first step torch makes states
    return held, on_host


COUNTS = 2 * 4  # bytes of the step counts of two runs of parameters, which an update copies


@pytest.mark.full
@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", ["dp2 zero2 offload:optim@disk", "dp2 zero3 offload:param@disk"])
def test_a_slow_disk_is_waited_for(plan: str, monkeypatch: pytest.MonkeyPatch):
    """More chunks than buffers, all slow: parity, no deadlock. The file holds the states, each in
    whole pages, and nothing else; a model of twice the size needs no more host memory.
    """
    monkeypatch.setattr("shardwise.core.buffer_sizes.CHUNK_NUMEL", 512)
    made, buffers = slow_down(monkeypatch, 0.001), set[int]()
    for width in (2048, 4096):
        found = run_threads(2, waiting, width, f"{plan} fp64")
        wanted = oracle(wide_task(width), Case("ddp", clip=0.5))
        assert_parity([held for held, _ in found], wanted, 1e-10)
        buffers |= {on_host for _, on_host in found}
    assert {*made} == {"preadv", "pwritev"}
    assert buffers == {reserved_bytes(2, 8, 512) + COUNTS}


CHUNKED = [
    ("pp2 gpipe:2 offload:param@disk", Task(tied_gpt)),
    ("dp2 zero3 offload:optim@disk", Task(tied_gpt)),
    ("dp2 zero3 offload:param@disk", layers("half frozen")),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("plan", "work"), CHUNKED)
def test_several_chunks_and_frozen_weights(plan: str, work: Task, monkeypatch: pytest.MonkeyPatch):
    """Chunks so short that each flat parameter has many; frozen weights are only read."""
    monkeypatch.setattr("shardwise.core.buffer_sizes.CHUNK_NUMEL", 512)
    for held in holds(run_threads, work, Case(f"{plan} fp64", clip=0.5)):
        memory = held.memory[0]
        assert memory["gradients"] == memory["optimizer"] == 0 < memory["optimizer on disk"]


def failing_disk(world: World, folder: str, plan: str) -> tuple[list[str], float]:
    """A step, a checkpoint, then the disk fails: what is said, and the loss of a fresh engine."""
    case, said = Case(plan), list[str]()
    engine = build(world, TASK, case)

    def step(k: int) -> Any:
        return engine.step(mine(engine, TASK.batch(k)))

    step(0)
    sw.save(engine, folder)
    assert engine.disk is not None
    engine.disk.sync()
    os.ftruncate(engine.disk.file, 0)
    for act in (lambda: step(1), lambda: step(1), lambda: sw.save(engine, folder)):
        try:
            act()
        except DiskError as error:
            said.append(str(error))
        world.barrier()
    engine = build(world, TASK, case)
    sw.load(engine, folder)
    return said, step(1).loss


@pytest.mark.parametrize("plan", ["dp2 zero2 offload:optim@disk", "dp2 zero3 offload:param@disk"])
def test_a_disk_that_fails(tmp_path: Path, plan: str):
    """The step fails, and all later ones; no checkpoint is made of it; the last one is whole."""
    wanted = oracle(TASK, Case("ddp", steps=2))
    for rank, (said, loss) in enumerate(
        run_threads(2, failing_disk, str(tmp_path), f"{plan} fp64")
    ):
        assert len(said) == 3
        for text in said:
            assert f"Rank {rank} cannot read chunk 0 of 1" in text and "the file ends" in text
        assert loss == pytest.approx(wanted.losses[1], rel=1e-10)


@cache
def unbounded(plan: Plan, rank: int) -> Prediction:
    rows = share(TASK.batch(0), 0, plan.completed(None).data_size)
    return predict(TASK.make(), plan, rows, rank=rank, loss=TASK.loss, units=1)


def predicted(plan: Plan, rank: int = 0) -> Prediction:
    """Of a plan without its bound, which changes nothing."""
    return unbounded(replace(plan, device_memory_bytes=None), rank)


def test_the_allocator_of_cuda_has_the_bound(monkeypatch: pytest.MonkeyPatch):
    """As a fraction of the device's memory, until the engine is freed."""
    seen: list[tuple[float, torch.device]] = []
    total = SimpleNamespace(total_memory=2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: total)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: seen.append(given)
    )
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.75)
    device = torch.device("cuda", 1)
    for most_bytes in (2**19, 2**30):
        Tiers(device=device).bound_device(most_bytes)
    assert seen == [(0.5, device), (0.75, device), (1.0, device), (0.75, device)]


def peak_of(text: str) -> int:
    """The largest peak of the ranks."""
    plan = Plan.parse(text)
    return max(predicted(plan, rank).device_peak for rank in range(plan.size))


@pytest.mark.parametrize("row", ["dp1", pytest.param("pp2 1f1b:2", marks=pytest.mark.full)])
def test_the_least_offload_that_fits(row: str):
    """A tighter bound takes more: nothing, states, parameters; then a refusal. The stage with the
    largest peak decides, also on the ranks of the others.
    """
    words = ("", "offload:optim", "offload:param")
    peaks = [peak_of(f"{row} fp32 {word}") for word in words]
    assert peaks == sorted(peaks, reverse=True)
    for peak, word in zip(peaks, words, strict=True):
        bounded = Plan.parse(f"{row} fp32 offload:auto device_memory:{peak}B")
        for rank in range(bounded.size):
            chosen = with_offload(bounded, partial(predicted, rank=rank))
            assert (chosen.offload or "") == word.removeprefix("offload:")
    tight = Plan.parse(f"{row} fp32 offload:auto device_memory:{min(peaks) - 1}B")
    with pytest.raises(InputError, match=f"{min(peaks):,} bytes or more"):
        with_offload(tight, predicted)
