"""Offload: where states rest and are updated, on which thread, few units on a device at once."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload

import shardwise as sw
from shardwise.comm.world import World
from shardwise.observe.meter import Meter
from shardwise.techniques.data import apply as shard
from shardwise.techniques.data.apply import driver_of, flats_of
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.offload.updater import HostThread, NextStep
from shardwise.techniques.offload.word import parse
from tests.engine.cases import ROWS, Case, Task, build, oracle, ranks_of
from tests.engine.loops import rows
from tests.engine.tensors import Held, assert_parity, mine, train
from tests.engine.zoo import make
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
    for held in run_threads(2, train, TASK, Case(f"{plan} fp64")):
        for what, tiers in zip(("parameters", "optimizer"), RESTS[plan], strict=True):
            names = {"device": what, "host": f"{what} on the host", "disk": f"{what} on disk"}
            found = [tier for tier, name in names.items() if held.memory[0].get(name)]
            assert found == tiers.split()


def in_parts(world: World, words: str) -> tuple[list[bool], Held]:
    """Steps without clipping in which units of 4 KiB are updated at once, and their updates."""
    engine, held, updates = build(world, TASK, Case(words)), Held(), []
    engine.updates = replace(engine.updates, early_bytes=4096)
    step = engine.optimizer.torch.step

    def noted(*args: Any) -> Any:
        updates.append(get_ident())
        return step(*args)

    engine.optimizer.torch.step = noted  # type: ignore[method-assign]
    for k in range(3):
        held.step(engine, mine(engine, TASK.batch(k)))
    return [get_ident() == thread for thread in updates], held.ended(engine)


@pytest.mark.parametrize(
    "plan",
    [
        *(f"dp2 zero2 offload:{what}" for what in ("optim", "optim=0.5")),
        *(f"dp2 zero3 accumulate:2 offload:{what}" for what in ("optim", "param")),
    ],
)
def test_several_updates_of_a_step_run_beside_arrivals(plan: str):
    """fp64, unclipped, in parts of 4 KiB: several updates a step on the host's thread; parity."""
    case = Case(f"{plan} fp64")
    found = run_threads(2, in_parts, case.plan)
    for here, _ in found:
        assert len(here) >= 3 * 3
        assert not any(here)
    assert_parity([held for _, held in found], oracle(TASK, case), 1e-10)


def set_slowly(flat: Flat, data: Sequence[Tensor]) -> None:
    """As Flat._set; in between, a thread that updates could take the pieces for assigned ones."""
    for p, tensor in zip(flat.params, data, strict=True):
        p.data = tensor
    time.sleep(0.01)
    flat.data = list(data)


@pytest.mark.parametrize("plan", ["dp2 zero1 offload:optim", "dp2 zero2 offload:optim"])
def test_an_update_looks_at_no_parameter_that_becomes_a_piece(
    plan: str, monkeypatch: pytest.MonkeyPatch
):
    """The main thread makes pieces of the next unit while the host's thread updates one."""
    monkeypatch.setattr(Flat, "_set", set_slowly)
    assert all(run_threads(2, in_parts, f"{plan} fp64"))


def test_the_fewest_units_with_the_fraction():
    """Units are taken from the last on, until they have at least the fraction."""
    numels = [40, 10, 0, 30, 20]
    first = {
        text: parse(text).tiers(numels).index("host")
        for text in ("optim=0.1", "optim=0.2", "optim=0.21", "optim=0.5", "optim=0.61", "optim=1")
    }
    assert list(first.values()) == [4, 4, 3, 3, 0, 0]


def measured(world: World, plan: str, what: str) -> tuple[int, list[int], int, int, list[Any]]:
    """Of the last of three steps the most bytes of a category on the device, beside units' bytes.

    What rests there, how much the optimizer's host memory grew, and leaks.
    """
    engine = build(world, TASK, Case(plan))
    meter = Meter(engine)
    for step in range(3):
        with meter:
            engine.step(mine(engine, TASK.batch(step)))
    units = [
        sum(group.plan.padded * group.shard.element_size() for group in unit.groups)
        for unit in engine.data.units.order
    ]
    growth = meter.host_peak["optimizer"] - engine.host_memory()["optimizer"]
    rests = engine.memory()[what]
    world.barrier()  # until then the other thread may hold a message of this one
    gc.collect()
    return meter.most[what], units, rests, growth, meter.leaks()


FEW = [(f"{plan} fp32 offload:param", "parameters", 3) for plan in ("dp1", "dp2 zero3")]
FEW += [(f"dp2 {row} fp32 offload:optim", "gradients", 4) for row in ROWS]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("plan", "what", "most_units"), FEW)
def test_the_device_has_few_units_at_once(plan: str, what: str, most_units: int):
    """Gradients of at most four units, or three units' parameters; a step leaves nothing there."""
    for most, units, rests, growth, leaks in run_threads(ranks_of(plan), measured, plan, what):
        assert 0 < most <= sum(sorted(units)[-most_units:]) < sum(units)
        assert (rests, growth, leaks) == (0, 0, [])


class Numbers:
    """An optimizer of numbers: 0 has 20 bytes, others 10, and the update of 7 fails."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[int], bool]] = []  # and whether on the thread of the test
        self.here, self.go = get_ident(), threading.Event()

    def note(self, what: str, items: Sequence[int]) -> None:
        self.seen.append((what, list(items), get_ident() == self.here))

    def step(self, items: Sequence[int], factor: float) -> None:
        assert self.go.wait(10)
        if 7 in items:
            raise ValueError("no such state")
        self.note("update", items)

    def later(self, items: Sequence[int], factor: float) -> Callable[[], None]:
        self.note("take", items)
        return partial(self.step, items, factor)

    def publish(self, items: Sequence[int]) -> None:
        self.note("publish", items)

    def clear(self, items: Sequence[int]) -> None:
        self.note("clear", items)

    def size_bytes(self, items: Sequence[int]) -> int:
        return sum(10 if k else 20 for k in items)


def test_updates_run_in_order_and_are_published_by_the_caller():
    """On another thread, what waits together up to a size; what follows each runs on this one."""
    work = Numbers()

    def arriving() -> Iterator[list[int]]:
        yield from ([k] for k in range(6))
        work.go.set()

    HostThread(work).update(arriving(), 1.0, 20)
    parts = [[0], [1, 2], [3, 4], [5]]
    for what, at_home in (("update", False), ("publish", True), ("clear", True)):
        found = [one for one in work.seen if one[0] == what]
        assert found == [(what, part, at_home) for part in parts]


def test_an_error_of_an_update_is_raised():
    """An error on the host's thread ends the step; updates that wait behind it are dropped."""
    work = Numbers()
    work.go.set()
    with pytest.raises(ValueError, match="no such state"):
        HostThread(work).update([[7], [1]], 1.0, 1)
    assert ("publish", [1], True) not in work.seen


def test_delayed_updates_are_published_in_order_when_finished():
    """They run on another thread with gradients taken before; none is published before `finish`."""
    work = Numbers()
    step = NextStep(work, order=lambda: [0, 1], delays=lambda: True)
    step.update([[1], [0]], 1.0, 1)
    assert step.pending and work.seen == [("take", [0], True), ("take", [1], True)]
    work.go.set()
    step.finish()
    assert not step.pending
    for what, at_home in (("update", False), ("publish", True)):
        found = [one for one in work.seen if one[0] == what]
        assert found == [(what, [0], at_home), (what, [1], at_home)]
    step = NextStep(work, order=lambda: [7], delays=lambda: True)
    step.update([[7]], 1.0, 1)
    with pytest.raises(ValueError, match="no such state"):
        step.finish()
    assert not step.pending


def test_units_go_to_the_tiers_in_the_order_of_their_gradients():
    """The last units, whose gradients come first, go furthest; by whole units."""
    numels = [40, 10, 10, 10, 30]
    assert parse("optim=0.5").tiers(numels) == ["device"] * 2 + ["host"] * 3
    assert parse("optim=0.3").tiers(numels) == ["device"] * 4 + ["host"]


class Scaled(nn.Module):
    """Twelve layers, and a parameter without dims in the last unit."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.scale = nn.Parameter(torch.tensor(1.0))
        for p in self.layers.parameters():
            nn.init.normal_(p, std=0.2, generator=own)

    def forward(self, x: Tensor) -> Tensor:
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


@pytest.mark.parametrize("plan", ["offload:param", "dp2 zero3 offload:param", "tp2 offload:param"])
def test_weights_go_to_the_device_unit_by_unit(plan: str, monkeypatch: pytest.MonkeyPatch):
    """Real weights stay where the program made them until their unit is laid out."""

    def cast(model: nn.Module, dtype: Any, _: Any, fill: Any = None, **options: Any) -> None:
        shard.cast_whole(model, dtype, torch.device("meta"), fill, **options)
        assert not any(p.is_meta for p in model.parameters())  # none has gone there

    def losses(world: World) -> list[float]:
        engine = build(world, TASK, Case(f"{plan} fp64"))
        return [engine.step(mine(engine, TASK.batch(0))).loss]

    ranks = ranks_of(plan)
    want = run_threads(ranks, losses)
    monkeypatch.setattr("shardwise.engine.engine.cast_whole", cast)
    assert run_threads(ranks, losses) == want


def resting(world: World, asked: Any) -> tuple[set[str], int, set[str]]:
    """After a backward pass: the tiers of shards and gradients, whole bytes, copies so far."""
    model = sw.FSDP(make("stack").double(), world=world, units=1, cpu_offload=asked)
    data = driver_of(model)
    assert data is not None
    flats = flats_of(data.units.order)
    model(rows(0, world.rank)).square().mean().backward()
    held = [x.detach() for p in model.parameters() for x in (p, p.grad) if x is not None]
    whole = sum(flat.full.untyped_storage().nbytes() for flat in flats)
    return (
        {flats[0].tiers.of(x) for x in held},
        whole,
        {k.kind for k in flats[0].tiers.ledger.copy()},
    )


@pytest.mark.parametrize("asked", [True, CPUOffload(offload_params=True)])
def test_fsdp_in_a_plain_loop(asked: Any):
    """`sw.FSDP(cpu_offload=)` keeps shards and gradients in host memory, and nothing whole."""
    for places, whole, kinds in run_threads(2, resting, asked):
        assert (places, whole) == ({"host"}, 0)
        assert {"device_to_host", "host_to_device"} <= kinds
