"""`offload:optim@disk`: gradients, masters and optimizer state rest on a disk, and stream by."""

import gc
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm.disk import THREADS, DiskError
from shardwise.comm.disk_use import Used
from shardwise.comm.world import World
from shardwise.core.chunks import reserved_bytes
from shardwise.core.plan import Plan
from shardwise.engine.meter import Meter
from shardwise.engine.state_dict import full_parameters
from shardwise.train.disk_share import StepsOnDisk, disk_line
from tests.engine.cases import (
    Case,
    Run,
    Task,
    build,
    difference,
    oracle,
    share,
    tied_gpt,
)
from tests.engine.offloading import (
    assert_costs,
    assert_parity,
    trained,
    trained_as_one,
)
from tests.pool import run_gloo, run_threads

TASK = Task()
WORD = "offload:optim@disk"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.RMSprop, {"lr": 0.01}),
        (torch.optim.NAdam, {"lr": 0.01}),
    ],
)
def test_with_other_optimizers(kind: Any, options: dict[str, Any]):
    """Any elementwise class that makes its state in a step, with any number of states."""
    case = Case(f"dp2 zero2 fp64 {WORD}", kind=kind, options=options)
    results = run_threads(2, trained, TASK, case)
    assert_parity(results, oracle(TASK, case), 1e-10)
    for _, costs in results:
        for (counted, predicted), (held, formula) in costs:
            assert (counted, held[1:]) == (predicted, formula[1:])


# --- memory: a model of any size in the same buffers ----------------------------------------------


class Wide(torch.nn.Module):
    """One linear layer and another, of `width` features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, width), torch.nn.Linear(width, 8)
        own = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's generator
        for p in self.parameters():
            torch.nn.init.normal_(p, std=0.1, generator=own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 8] to [N, 8]."""
        return self.down(torch.tanh(self.up(x)))


def wide_task(width: int) -> Task:
    def batch(step: int) -> Any:
        own = torch.Generator().manual_seed(step)
        x = torch.randn(6, 8, generator=own, dtype=torch.float64)
        return x, x.flip(1).sin()

    def loss(model: torch.nn.Module, pair: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(pair[0]), pair[1])

    return Task(lambda: Wide(width), batch, loss, None)


def arena(world: World, width: int, plan: str) -> tuple[Run, list[int], list[int], list[Any]]:
    """A training with the host's peaks in each step, and the bytes of disk, host and device."""
    case, task = Case(f"{plan} fp64", clip=0.5), wide_task(width)
    engine, run, peaks = build(world, task, case), Run(), []
    meter = Meter(engine)
    for step in range(case.steps):
        with meter:
            run.losses.append(engine.step(share(task.batch(step), world.rank, world.size)).loss)
        peaks.append(sum(meter.host_peak.values()))
    run.weights = full_parameters(engine.flats)
    world.barrier()
    gc.collect()
    device = {category: n for category, n in engine.memory().items() if category != "buffers"}
    tiers = [sum(of.values()) for of in (engine.disk_memory(), engine.host_memory(), device)]
    return run, peaks, tiers, meter.leaks()


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
        for run, peaks, (disk, held, device), leaks in results:
            assert run.losses == pytest.approx(wanted.losses, rel=1e-10)
            for name, weight in run.weights.items():
                assert difference(weight, wanted.weights[name]) <= 1e-10, name
            assert disk >= 4 * held
            assert max(peaks[1:]) <= held + 2 * counts  # in the first step torch makes states
            assert leaks == []
            assert device == 0 or "optim" in plan
            found.add(held)
    assert found == {reserved_bytes(2, 8, 512) + counts}


# --- errors ---------------------------------------------------------------------------------------


def failing(world: World, folder: str, words: str) -> tuple[list[str], float]:
    """A step, a checkpoint, then the disk fails; what is said then, and a fresh engine's step."""
    case, said = Case(f"dp2 {words} fp64"), list[str]()
    engine = build(world, TASK, case)

    def step(k: int) -> None:
        engine.step(share(TASK.batch(k), engine.data_rank, engine.data_ranks))

    step(0)
    sw.save(engine, folder)
    states = engine.optimizer.disk
    assert states is not None
    states.disk.sync()
    os.ftruncate(states.disk.file, 0)
    for act in (lambda: step(1), lambda: step(1), lambda: sw.save(engine, folder)):
        try:
            act()
        except DiskError as error:
            said.append(str(error))
        world.barrier()
    again = build(world, TASK, case)
    sw.load(again, folder)
    return said, again.step(share(TASK.batch(1), again.data_rank, again.data_ranks)).loss


@pytest.mark.parametrize("words", ["zero2 offload:optim@disk", "zero3 offload:param@disk"])
def test_a_disk_that_fails(tmp_path: Path, words: str):
    """The step fails, and all later ones; no checkpoint is made of it; the last one is whole."""
    wanted = oracle(TASK, Case("ddp", steps=2))
    for rank, (said, loss) in enumerate(run_gloo(2, failing, str(tmp_path), words)):
        assert len(said) == 3
        for text in said:
            assert f"Rank {rank} cannot read chunk 0 of 1" in text
            assert "the file ends" in text
        assert loss == pytest.approx(wanted.losses[1], rel=1e-10)


@pytest.mark.parametrize("plan", ["pp2 gpipe:2 offload:param@disk", "dp2 zero3 offload:optim@disk"])
def test_several_chunks(plan: str, monkeypatch: pytest.MonkeyPatch):
    """Chunks so short that each flat parameter has many: parity, and bytes as predicted."""
    monkeypatch.setattr("shardwise.core.chunks.CHUNK_NUMEL", 512)
    case = Case(f"{plan} fp64", clip=0.5)
    results = trained_as_one(run_threads, Task(tied_gpt), case)
    assert_costs(results, on_disk=True)


class Frozen(torch.nn.Module):
    """A frozen layer between two that are trained."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(0)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        for p in self.parameters():
            torch.nn.init.normal_(p, std=0.3, generator=own)
        self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers(x))


@pytest.mark.parametrize("plan", ["dp1", "dp2 zero3"])
def test_frozen_parameters_rest_there_too(plan: str):
    """They are read before each use, and never written."""
    task = Task(Frozen, wide_task(8).batch, wide_task(8).loss, None)
    case = Case(f"{plan} fp64 offload:param@disk", clip=0.5)
    results = run_threads(Plan.parse(plan).size, trained, task, case)
    assert_parity(results, oracle(task, case), 1e-10)
    assert_costs(results, on_disk=True)


DELAY_S = 0.002
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


def waiting(world: World, plan: str) -> tuple[Run, Used, int, str]:
    """A training, its use of the disk, the number of chunks of the rank's states, and the words."""
    case, run = Case(plan, clip=0.5), Run()
    engine = build(world, SLOW, case)
    steps = StepsOnDisk(engine)
    for step in range(case.steps):
        own = share(SLOW.batch(step), world.rank, world.size)
        run.losses.append(engine.step(own).loss)
    used, states = steps.use_in_steps(), engine.optimizer.disk
    assert states is not None
    assert states.disk.free == states.disk.buffers - 1  # the one that widens gradients is kept
    chunks = sum(extent.chunks for extent in states.disk.extents)
    run.weights = full_parameters(engine.flats)
    return run, used, chunks, disk_line(steps, 2**20)


@pytest.mark.parametrize("plan", ["dp2 zero2 offload:optim@disk", "dp2 zero3 offload:param@disk"])
def test_a_slow_disk_is_waited_for(plan: str, monkeypatch: pytest.MonkeyPatch):
    """More chunks than buffers, all slow: parity, no deadlock, and the run says how it waited."""
    monkeypatch.setattr("shardwise.core.chunks.CHUNK_NUMEL", 512)
    made = slow_down(monkeypatch)
    wanted = oracle(SLOW, Case("ddp", clip=0.5))
    for run, used, chunks, words in run_threads(2, waiting, f"{plan} fp64"):
        assert run.losses == pytest.approx(wanted.losses, rel=1e-10)
        for name, weight in run.weights.items():
            assert difference(weight, wanted.weights[name]) <= 1e-10, name
        assert used.busy_s >= 3 * chunks * DELAY_S / THREADS  # each chunk is read in each step
        assert used.waited_s > 0 < used.updated_s
        assert words == "" or re.search(r"they waited \d+\.\d of \d+\.\d s for it$", words)
    assert {*made} == {"preadv", "pwritev"}
