"""`offload:optim`: gradients, masters and optimizer state rest and are updated in host memory."""

import gc
import threading
from collections.abc import Sequence
from dataclasses import replace
from threading import get_ident
from typing import Any

import pytest

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
    oracle,
    share,
)
from tests.engine.offloading import trained
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
    "dp2 zero2 offload:optim=0.7,disk=0.3": ("device", "device host disk"),
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
