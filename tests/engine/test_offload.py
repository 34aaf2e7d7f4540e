"""Offload: on which thread and when states are updated, few units on the device at once."""

import gc
import time
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer.updating import MemoryOptimizer
from shardwise.observe.meter import Meter
from shardwise.techniques.data import apply as shard
from shardwise.techniques.data.apply import flats_of
from shardwise.techniques.data.flat.flat_parameter import Flat
from tests.engine.cases import Case, Task, build, oracle, ranks_of, settled, squares
from tests.engine.loops import rows
from tests.engine.tensors import Held, assert_parity, mine
from tests.engine.test_wrapped import data_of
from tests.engine.zoo import make
from tests.pool import run_threads

TASK = Task()


def step_of(engine: Engine, step: int) -> Any:
    return engine.step(mine(engine, TASK.batch(step)))


# --- the host's thread ----------------------------------------------------------------------------


def in_parts(world: World, words: str) -> tuple[list[bool], Held]:
    """Steps without clipping in which units of 4 KiB are updated at once, and their updates."""
    engine, held, updates = build(world, TASK, Case(words)), Held(), []
    engine.updates.early_bytes = 4096
    step = engine.optimizer.torch.step

    def noted(*args: Any) -> Any:
        updates.append(get_ident())
        return step(*args)

    engine.optimizer.torch.step = noted  # type: ignore[method-assign]
    for k in range(3):
        held.step(engine, mine(engine, TASK.batch(k)))
    return [get_ident() == thread for thread in updates], held.ended(engine)


def set_slowly(flat: Flat, data: Sequence[Tensor]) -> None:
    """As Flat._set; in between, a thread that updates could take the pieces for assigned ones."""
    for p, tensor in zip(flat.params, data, strict=True):
        p.data = tensor
    time.sleep(0.01)
    flat.data = list(data)


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


def measured(world: World, plan: str, what: str) -> tuple[int, list[int], int, int, list[Any]]:
    """Of the last of three steps the most bytes of a category on the device, beside units' bytes.
    What rests there, how much the optimizer's host memory grew, and leaks.
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
    growth = meter.host_peak["optimizer"] - engine.host_memory()["optimizer"]
    rests = engine.memory()[what]
    world.barrier()  # until then the other thread may hold a message of this one
    gc.collect()
    return meter.most[what], units, rests, growth, meter.leaks()


FEW = [(f"{plan} fp32 offload:param", "parameters", 3) for plan in ("dp1", "dp2 zero3")]
FEW += [(f"dp2 {row} fp32 offload:optim", "gradients", 4) for row in ("ddp", "zero1", "zero2")]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("plan", "what", "most_units"), FEW)
def test_the_device_has_few_units_at_once(plan: str, what: str, most_units: int):
    """Gradients of at most four units, or three units' parameters; a step leaves nothing there."""
    for most, units, rests, growth, leaks in run_threads(ranks_of(plan), measured, plan, what):
        assert 0 < most <= sum(sorted(units)[-most_units:]) < sum(units)
        assert (rests, growth, leaks) == (0, 0, [])


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


def resting(world: World, asked: Any) -> tuple[set[str], int, set[str]]:
    """After a backward pass: the tiers of shards and gradients, whole bytes, copies so far."""
    model = sw.FSDP(make("stack").double(), world=world, units=1, cpu_offload=asked)
    flats = flats_of(data_of(model).units.order)
    model(rows(0, world.rank)).square().mean().backward()
    held = [x.detach() for p in model.parameters() for x in (p, p.grad) if x is not None]
    tiers, whole = flats[0].tiers, sum(flat.full.untyped_storage().nbytes() for flat in flats)
    return {tiers.of(x) for x in held}, whole, {k.kind for k in tiers.ledger.lines}


@pytest.mark.parametrize("asked", [True, CPUOffload(offload_params=True)])
def test_fsdp_in_a_plain_loop(asked: Any):
    """`sw.FSDP(cpu_offload=)` keeps shards and gradients in host memory, and nothing whole."""
    for places, whole, kinds in run_threads(2, resting, asked):
        assert (places, whole) == ({"host"}, 0)
        assert {"device_to_host", "host_to_device"} <= kinds


# --- updates that are one step late ---------------------------------------------------------------


def late_overflow(world: World) -> list[tuple[bool, bool]]:
    """Of four delayed steps, which were skipped, and after which an update was pending."""
    words = "dp2 zero2 fp16 offload:optim-delayed=0"
    engine = build(world, TASK, Case(words, options={"lr": 0.01, "eps": 1e-4}))
    found = list[tuple[bool, bool]]()
    for step in range(4):
        before = [box.tensor.clone() for box in engine.boxes()] if step == 2 else []
        engine.scale.value = 2.0**60 if step == 2 else 2.0**10
        found.append((step_of(engine, step).skipped, bool(engine.optimizer.running)))
        if step == 2:
            assert all(map(torch.equal, before, [box.tensor for box in engine.boxes()]))
    return found


def test_an_overflow_of_a_delayed_step_is_skipped():
    """The update of an overflowing step is never made, neither then nor one step later."""
    for found in run_threads(2, late_overflow):
        assert found == [(False, True), (False, True), (True, False), (False, True)]


def test_states_are_read_after_the_update_beside_the_step(monkeypatch: pytest.MonkeyPatch):
    """A delayed update still runs when the program reads its states, which are those after it."""
    real = MemoryOptimizer._update
    monkeypatch.setattr(MemoryOptimizer, "_update", lambda *of: (time.sleep(0.05), real(*of)))
    plan, model = "offload:optim-delayed=0 fp64", settled(nn.Linear(6, 6))
    engine = sw.parallelize(model, plan, alone(), optimizer=sw.AdamW(lr=0.1), loss=squares)
    for step in range(3):
        engine.step(rows(step, 0))
        assert engine.optimizer.state[model.get_parameter("weight")]["step"].item() == step + 1
