"""`offload:optim`: gradients, masters and optimizer state rest and are updated in host memory."""

import gc
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.offload import parse
from shardwise.engine.meter import Meter
from shardwise.engine.state_dict import full_parameters
from shardwise.parallel.offload.host_thread import HostThread
from tests.engine.cases import (
    Case,
    Run,
    Task,
    build,
    difference,
    expected_near,
    oracle,
    rows_task,
    settled,
    share,
)
from tests.engine.offloading import assert_parity, trained
from tests.engine.test_zoo import DECAY, gated
from tests.engine.zoo import Gated
from tests.pool import run_threads

TASK = Task()


#: By hand: the tiers on which parameters and optimizer states rest; counts of steps rest on the
#: host beside states on a disk.
RESTS = {
    "dp2 zero2 offload:optim": ("device", "host"),
    "dp2 zero2 offload:optim@disk": ("device", "host disk"),
    "dp2 zero3 offload:param": ("host", "host"),
    "dp2 zero3 offload:param@disk": ("disk", "host disk"),
    "dp2 zero2 offload:optim=0.5": ("device", "device host"),
}


@pytest.mark.parametrize("plan", RESTS)
def test_where_states_rest(plan: str):
    """After a step parameters and optimizer states are on the tiers of the word, and no other."""
    for _, costs in run_threads(2, trained, TASK, Case(f"{plan} fp64")):
        held = dict(zip(("device", "host", "disk"), costs[-1][1][0], strict=True))
        for what, tiers in zip(("parameters", "optimizer"), RESTS[plan], strict=True):
            assert [tier for tier, of in held.items() if of[what]] == tiers.split()


def in_parts(world: World, words: str) -> tuple[list[bool], Run]:
    """Steps without clipping in which units of 4 KiB are updated at once, and their updates."""
    engine, run, updates = build(world, TASK, Case(words)), Run(), []
    engine.updates = replace(engine.updates, early_bytes=4096)
    step = engine.optimizer.torch.step

    def noted(*args: Any) -> Any:
        updates.append(get_ident())
        return step(*args)

    engine.optimizer.torch.step = noted  # type: ignore[method-assign]
    for k in range(3):
        run.losses.append(engine.step(share(TASK.batch(k), world.rank, world.size)).loss)
    run.weights = full_parameters(engine.flats)
    return [get_ident() == thread for thread in updates], run


@pytest.mark.parametrize("words", ["dp2 zero2", "dp2 zero3 accumulate:2"])
@pytest.mark.parametrize("what", ["optim", "optim=0.5", "param"])
def test_several_updates_of_a_step_run_beside_arrivals(words: str, what: str):
    """fp64, unclipped, in parts of 4 KiB: several updates a step on the host's thread; parity."""
    if what == "param" and "zero3" not in words:
        words = words.replace("zero2", "zero3")
    case = Case(f"{words} fp64 offload:{what}")
    wanted = oracle(TASK, case)
    for here, run in run_threads(2, in_parts, case.plan):
        assert len(here) >= 3 * 3
        assert not any(here)
        assert run.losses == pytest.approx(wanted.losses, rel=1e-10)
        for name, weight in run.weights.items():
            assert difference(weight, wanted.weights[name]) <= 1e-10, name


def test_the_fewest_units_with_the_fraction():
    """Units are taken from the last on, until they have at least the fraction."""
    numels = [40, 10, 0, 30, 20]
    first = {
        text: parse(text).tiers(numels).index("host")
        for text in ("optim=0.1", "optim=0.2", "optim=0.21", "optim=0.5", "optim=0.61", "optim=1")
    }
    assert list(first.values()) == [4, 4, 3, 3, 0, 0]


def measured(world: World, plan: str) -> tuple[int, int, list[Any], list[int]]:
    """Of the last of three steps: the most bytes of gradients on the device, the leaks."""
    case = Case(plan)
    engine = build(world, TASK, case)
    meter = Meter(engine)
    for step in range(3):
        with meter:
            engine.step(share(TASK.batch(step), engine.data_rank, engine.data_ranks))
    units = [
        sum(group.plan.padded * group.shard.element_size() for group in unit.trained)
        for unit in engine.data.units.order
    ]
    held = engine.host_memory()["optimizer"]
    world.barrier()  # until then the other thread may hold a message of this one
    gc.collect()
    return meter.most["gradients"], meter.host_peak["optimizer"] - held, meter.leaks(), units


@pytest.mark.full
@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2", "zero3"])
def test_the_device_has_few_gradients_at_once(row: str):
    """Of a rank's gradients the device has those of at most four units; a step leaves nothing."""
    for most, growth, leaks, units in run_threads(2, measured, f"dp2 {row} fp32 offload:optim"):
        assert 0 < most <= sum(sorted(units)[-4:]) < sum(units)
        assert growth == 0
        assert leaks == []


def test_updates_run_in_order_and_are_published_by_the_caller():
    """On another thread, what waits together up to a size; what follows each runs on this one."""
    seen: list[tuple[str, list[int], bool]] = []
    here, first = threading.get_ident(), threading.Event()

    def update(items: Sequence[int]) -> None:
        assert first.wait(10)
        seen.append(("update", list(items), threading.get_ident() == here))

    def publish(items: Sequence[int]) -> None:
        seen.append(("publish", list(items), threading.get_ident() == here))

    with HostThread(update, publish, most_bytes=20) as thread:
        thread.run([0], 20)
        for k in range(1, 6):
            thread.run([k], 10)
        first.set()
    parts = [[0], [1, 2], [3, 4], [5]]
    for what, at_home in (("update", False), ("publish", True)):
        assert [one for one in seen if one[0] == what] == [(what, part, at_home) for part in parts]


def test_an_error_of_an_update_is_raised():
    """An error on the host's thread ends the step; updates that wait behind it are dropped."""
    updated: list[int] = []

    def update(items: Sequence[int]) -> None:
        if items == [0]:
            raise ValueError("no such state")

    def run() -> None:
        with HostThread(update, updated.extend, most_bytes=1) as thread:
            thread.run([0], 1)
            thread.run([1], 1)

    with pytest.raises(ValueError, match="no such state"):
        run()
    assert updated == []


def assert_tiers(results: list[Any], tiers: str) -> None:
    """Bytes sent and held are those predicted, and all of `tiers` have optimizer states."""
    for _, costs in results:
        for (counted, predicted), (held, formula) in costs:
            assert counted == predicted
            assert held == formula
            device, host, disk = held
            by_tier = {"device": device, "host": host, "disk": disk}
            assert all(by_tier[tier]["optimizer"] > 0 for tier in tiers.split())


@pytest.mark.parametrize(("what", "tiers"), [("optim=0.4", "device host"), ("optim@disk", "disk")])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
        (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    ],
)
def test_other_optimizers(what: str, tiers: str, kind: Any, options: dict[str, Any]):
    """Momenta that a step makes, on the tier of each unit."""
    case = Case(f"dp2 zero2 fp64 offload:{what}", kind=kind, options=options)
    results = run_threads(2, trained, TASK, case)
    assert_parity(results, oracle(TASK, case), 1e-10)
    assert_tiers(results, tiers)


def late(step: int) -> tuple[Tensor, Tensor]:
    """Rows that do not ask for the module `side` in the first step."""
    return gated(1 if step == 0 else 2)


@pytest.mark.parametrize("words", ["", "offload:optim", "offload:optim@disk"])
def test_a_first_gradient_beside_momenta(words: str):
    """One call of torch's SGD has parameters that have a momentum, and some that have none yet."""
    task = rows_task(lambda: settled(Gated()), late)
    case = Case(f"dp2 zero2 fp64 {words}", units=2**20, **DECAY["SGD"])
    wanted = oracle(task, case)
    assert [g["side.weight"] is None for g in wanted.grads] == [True, False, False]
    for run, _ in run_threads(2, trained, task, case):
        assert run.losses == expected_near(wanted.losses, 1e-10)
        for name, weight in wanted.weights.items():
            assert difference(run.weights[name], weight) <= 1e-10, name


class Scaled(torch.nn.Module):
    """Twelve layers, and a parameter without dims in the last unit."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(12))
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        for p in self.layers.parameters():
            torch.nn.init.normal_(p, std=0.2, generator=own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 64] to [N, 64]."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def scaled_engine(plan: str, folder: Path) -> sw.Engine:
    """With groups of the optimizer, of which each unit has members."""
    return sw.parallelize(
        Scaled().double(),
        f"fp64 {plan}",
        sw.init(),
        optimizer=sw.AdamW(lr=1e-2, groups={"*bias": {"weight_decay": 0.0}, "scale": {"lr": 0.1}}),
        loss=lambda model, x: model(x).square().mean(),
        offload_folder=str(folder),
        least_unit_bytes=1,
    )


def steps_of(engine: sw.Engine, first: int, last: int) -> list[float]:
    """The losses of some steps."""
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [engine.step(rows * (k + 1)).loss for k in range(first, last)]


@pytest.mark.parametrize("words", ["offload:optim=0.5", "offload:optim@disk"])
def test_groups_of_the_optimizer_change_no_bit(words: str, tmp_path: Path):
    """Each unit has members of several groups, stepped on the host's thread or from the disk."""
    wanted = steps_of(scaled_engine("", tmp_path), 0, 8)
    for _ in range(3):
        assert steps_of(scaled_engine(words, tmp_path), 0, 8) == wanted


def test_a_parameter_without_dims_after_loading(tmp_path: Path):
    """Its states stay in host memory, so that a loaded run goes on as the other does."""
    words = "offload:optim@disk"
    engine = scaled_engine(words, tmp_path)
    steps_of(engine, 0, 2)
    sw.save(engine, tmp_path / "saved")
    again = scaled_engine(words, tmp_path)
    sw.load(again, tmp_path / "saved")
    assert steps_of(again, 2, 6) == steps_of(engine, 2, 6)


@pytest.mark.parametrize("what", ["optim@disk", "param@disk"])
def test_full_weights_while_the_disk_writes(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`sw.full_state_dict` waits for writes that are under way."""
    write = os.pwritev

    def slow(*args: Any) -> int:
        time.sleep(0.02)
        return write(*args)

    plain, engine = (scaled_engine(plan, tmp_path) for plan in ("", f"offload:{what}"))
    monkeypatch.setattr(os, "pwritev", slow)
    assert steps_of(plain, 0, 2) == steps_of(engine, 0, 2)
    wanted, found = (sw.full_state_dict(each) for each in (plain, engine))
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
