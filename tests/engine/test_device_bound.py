"""The bound on a device's memory counts rarely, and raises as if it counted each time."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.world import World
from shardwise.engine.device_bound import DeviceBound
from shardwise.engine.meter import Meter
from tests.engine.cases import Case, Task, build, share
from tests.pool import run_threads

TASK = Task()
PLANS = [
    "dp1 fp32 recompute:full",
    "dp2 zero3 bf16",
    "dp2 zero2 fp16 accumulate:2",
    "dp2 zero3 fp32 offload:param",
    "dp2 zero2 fp32 offload:optim-delayed=0",
    "dp2 zero1 fp32 offload:optim=0.5",
    "dp2 zero3 fp32 arenas recompute:full",
    "tp2 fp32",
    "pp2 fp32 1f1b:2",
]
Count = tuple[int, int]


class CountedEachTime(TorchDispatchMode):
    """After each operation, the most bytes by `bound`, and the bytes by a meter that counts them.

    `bound` then counts too, so that the next operation alone makes the difference.
    """

    def __init__(self, engine: Any, bound: DeviceBound) -> None:
        super().__init__()
        self.meter, self.bound, self.counts = Meter(engine), bound, list[Count]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self.meter.track(func, args, made)
        every = self.meter.now()
        live = sum(count for place, count in every.items() if place.tier == "device")
        self.counts.append((self.bound.at_most_bytes, live))
        self.bound._count()
        return made


def counted_each_time(world: World, plan: str) -> list[Count]:
    """The counts of three steps, of those in which storages are not always counted."""
    engine, found = build(world, TASK, Case(plan)), list[Count]()
    for step in range(3):
        rows = share(TASK.batch(step), engine.data_rank, engine.data_ranks)
        with DeviceBound(engine, 2**60) as bound, CountedEachTime(engine, bound) as seen:
            engine.step(rows)
        found += [] if bound.counts_always else seen.counts
    return found


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
def test_no_operation_adds_more_than_the_bound_adds(plan: str):
    """What was live before and what an operation makes are no less than what is live after it."""
    ranks = 1 if "dp1" in plan else 2
    for counts in run_threads(ranks, counted_each_time, plan):
        assert len(counts) > 100
        assert all(most >= live for most, live in counts)
        assert any(most > live for most, live in counts)


def peaks(world: World, plan: str) -> list[int]:
    """The peaks of two steps."""
    engine, found = build(world, TASK, Case(plan)), list[int]()
    meter = Meter(engine)
    for step in range(2):
        rows = share(TASK.batch(step), engine.data_rank, engine.data_ranks)
        with meter:
            engine.step(rows)
        found.append(meter.peak_bytes)
    return found


def bounded(world: World, plan: str) -> tuple[str, list[int]]:
    """Two steps in the bound of `plan`: the error, if any, and how often storages were counted."""
    engine, counts = build(world, TASK, Case(plan)), list[int]()
    assert isinstance(engine.bound, DeviceBound)
    count = engine.bound._count

    def counted() -> None:
        counts[-1] += 1
        count()

    engine.bound._count = counted
    for step in range(2):
        counts.append(0)
        try:
            engine.step(share(TASK.batch(step), engine.data_rank, engine.data_ranks))
        except torch.OutOfMemoryError as error:
            return str(error), counts
    return "", counts


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "plan",
    [
        "dp1 fp32",
        "dp1 bf16 recompute:full",
        "dp1 zero3 fp16 accumulate:2",
        "dp1 fp32 offload:optim",
        "dp1 bf16 offload:param recompute:full",
    ],
)
def test_a_bound_holds_to_the_byte(plan: str):
    """Steps run in a bound of as many bytes as their peak, and in one less they do not."""
    ((first, second),) = run_threads(1, peaks, plan)
    most = max(first, second)
    ((error, _),) = run_threads(1, bounded, f"{plan} device_memory:{most}B")
    assert error == ""
    ((error, _),) = run_threads(1, bounded, f"{plan} device_memory:{most - 1}B")
    assert error.startswith(
        f"{most:,} bytes on the device, where device_memory allows {most - 1:,}"
    )


def always(world: World, plan: str) -> list[bool]:
    """For each of three steps whether storages are counted after each operation."""
    engine, found = build(world, TASK, Case(plan)), list[bool]()
    for step in range(3):
        with DeviceBound(engine, 2**60) as bound:
            engine.step(share(TASK.batch(step), engine.data_rank, engine.data_ranks))
        found.append(bound.counts_always)
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", [False, False, False]),
        ("offload:optim=0.5", [True, False, False]),
    ],
)
def test_storages_are_counted_always_while_a_thread_makes_states(words: str, expected: list[bool]):
    """In the first step, which makes the states in host memory."""
    assert run_threads(2, always, f"dp2 zero1 fp32 {words}") == [expected] * 2


def test_with_room_storages_are_counted_once_a_step():
    """When a step begins; its operations only add what they make."""
    ((error, counts),) = run_threads(1, bounded, "dp1 fp32 device_memory:1GiB")
    assert (error, counts) == ("", [1, 1])
