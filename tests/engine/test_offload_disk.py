"""`offload:optim@disk`: gradients, masters and optimizer state rest on a disk, and stream by."""

import gc
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardwise as sw
from shardwise.comm.tiers.disk import THREADS, DiskError
from shardwise.comm.tiers.disk_use import Used
from shardwise.comm.world import World
from shardwise.core.chunks import reserved_bytes
from shardwise.observe.meter import Meter
from shardwise.train.measure.disk_line import disk_line
from tests.engine.cases import Case, Task, build, oracle, rows_task, settled, tied_gpt, vectors
from tests.engine.pipelines import task
from tests.engine.tensors import Held, assert_parity, holds, mine
from tests.pool import run_gloo, run_threads

TASK = Task()
WORD = "offload:optim@disk"


# --- memory: a model of any size in the same buffers ----------------------------------------------


def wide(width: int) -> nn.Module:
    """Two linear layers, of `width` features between them."""
    return settled(nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)))


def wide_task(width: int) -> Task:
    return rows_task(partial(wide, width), partial(vectors, rows=6, width=8))


def arena(world: World, width: int, plan: str) -> tuple[Held, list[int], list[int], list[Any]]:
    """A training with the host's peaks in each step, and the bytes of disk, host and device."""
    task = wide_task(width)
    engine, held, peaks = build(world, task, Case(f"{plan} fp64", clip=0.5)), Held(), list[int]()
    meter = Meter(engine)
    for step in range(3):
        with meter:
            metrics = engine.step(mine(engine, task.batch(step)))
        held.note(engine, metrics)
        peaks.append(sum(meter.host_peak.values()))
    held.ended(engine)
    world.barrier()
    gc.collect()
    device = {category: n for category, n in engine.memory().items() if category != "buffers"}
    tiers = [sum(of.values()) for of in (engine.disk_memory(), engine.host_memory(), device)]
    return held, peaks, tiers, meter.leaks()


@pytest.mark.full
@pytest.mark.parametrize("plan", [f"dp2 zero2 {WORD}", "dp2 zero3 offload:param@disk"])
def test_states_larger_than_the_host_memory_they_have(plan: str, monkeypatch: pytest.MonkeyPatch):
    """States of 4 times the host's buffers and more; a model of 4 times the size needs no more."""
    monkeypatch.setattr("shardwise.core.chunks.CHUNK_NUMEL", 512)
    counts = 4 * 4  # bytes of the step counts of four parameters, which an update copies
    found: set[int] = set()
    for width in (2048, 8192):
        results = run_threads(2, arena, width, plan)
        wanted = oracle(wide_task(width), Case("ddp", clip=0.5))
        assert_parity([one for one, *_ in results], wanted, 1e-10)
        for _, peaks, (disk, held, device), leaks in results:
            assert disk >= 4 * held
            assert max(peaks[1:]) <= held + 2 * counts  # in the first step torch makes states
            assert leaks == []
            assert device == 0 or "optim" in plan
            found.add(held)
    assert found == {reserved_bytes(2, 8, 512) + counts}


# --- errors ---------------------------------------------------------------------------------------


def failing(world: World, folder: str, plan: str) -> tuple[list[str], float]:
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


@pytest.mark.parametrize("plan", [f"dp2 zero2 fp64 {WORD}", "dp2 zero3 fp64 offload:param@disk"])
def test_a_disk_that_fails(tmp_path: Path, plan: str):
    """The step fails, and all later ones; no checkpoint is made of it; the last one is whole."""
    wanted = oracle(TASK, Case("ddp", steps=2))
    for rank, (said, loss) in enumerate(run_gloo(2, failing, str(tmp_path), plan)):
        assert len(said) == 3
        for text in said:
            assert f"Rank {rank} cannot read chunk 0 of 1" in text and "the file ends" in text
        assert loss == pytest.approx(wanted.losses[1], rel=1e-10)


CHUNKED = [
    (plan, Task(tied_gpt)) for plan in ("pp2 gpipe:2 offload:param@disk", f"dp2 zero3 {WORD}")
]


CHUNKED += [(f"{plan} offload:param@disk", task("half frozen")) for plan in ("dp1", "dp2 zero3")]


@pytest.mark.cases(4)
@pytest.mark.parametrize(("plan", "work"), CHUNKED)
def test_several_chunks_and_frozen_weights(plan: str, work: Task, monkeypatch: pytest.MonkeyPatch):
    """Chunks so short that each flat parameter has many; frozen weights are only read."""
    monkeypatch.setattr("shardwise.core.chunks.CHUNK_NUMEL", 512)
    for held in holds(run_threads, work, Case(f"{plan} fp64", clip=0.5)):
        memory = held.memory[0]
        assert memory["gradients"] == memory["optimizer"] == 0 < memory["optimizer on disk"]


DELAY_S, PAGE_BYTES = 0.002, 4096
SLOW = wide_task(2048)


def slow_down(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Delay each read and write of a file by DELAY_S; return a list that gets the name of each."""
    made = list[str]()

    def slow(name: str, real: Any, *given: Any) -> int:
        made.append(name)
        time.sleep(DELAY_S)
        return real(*given)

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, partial(slow, name, getattr(os, name)))
    return made


def waiting(world: World, plan: str) -> tuple[Held, Used, int, str]:
    """A training, its use of the disk, the number of chunks of the rank's states, and the words."""
    engine, held = build(world, SLOW, Case(plan, clip=0.5)), Held()
    disk = engine.disk
    assert disk is not None
    disk.sync()
    before = disk.use.so_far
    for step in range(3):
        held.step(engine, mine(engine, SLOW.batch(step)))
    disk.sync()
    used = disk.use.so_far - before
    assert disk.free == disk.buffers - 1  # the one that widens gradients is kept
    chunks = sum(extent.chunks for extent in disk.extents)
    unused_bytes = os.fstat(disk.file).st_size - sum(engine.disk_memory().values())
    assert 0 <= unused_bytes < PAGE_BYTES * len(disk.extents)
    return held.ended(engine), used, chunks, disk_line(engine)


@pytest.mark.parametrize("plan", ["dp2 zero2 offload:optim@disk", "dp2 zero3 offload:param@disk"])
def test_a_slow_disk_is_waited_for(plan: str, monkeypatch: pytest.MonkeyPatch):
    """More chunks than buffers, all slow: parity, no deadlock, and the run says how it waited.

    The file holds the states, each in whole pages, and nothing else.
    """
    monkeypatch.setattr("shardwise.core.chunks.CHUNK_NUMEL", 512)
    made = slow_down(monkeypatch)
    found = run_threads(2, waiting, f"{plan} fp64")
    assert_parity([held for held, *_ in found], oracle(SLOW, Case("ddp", clip=0.5)), 1e-10)
    for _, used, chunks, words in found:
        assert used.busy_s >= 3 * chunks * DELAY_S / THREADS  # each chunk is read in each step
        assert used.waited_s > 0 < used.updated_s
        assert words == "" or re.search(r"they waited \d+\.\d s for it$", words)
    assert {*made} == {"preadv", "pwritev"}
