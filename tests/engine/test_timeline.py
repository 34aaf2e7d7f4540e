"""The memory of a step at each of its events: what is measured is what was predicted."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import nn

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.core.memory_table import PREDICTED, TEMPORARY
from shardwise.engine.options import EngineOptions
from shardwise.models import gpt
from shardwise.models.initial import fill
from shardwise.observe.allocation_trace import MemoryRecorder
from shardwise.observe.measured_timeline import measuring, predict_events
from shardwise.prediction.first_fit import AllocationTrace, peak_bytes
from shardwise.prediction.memory_timeline import Event
from tests.engine.cases import Task, ranks_of, rows_task, share, small_gpt, text, tied_gpt
from tests.engine.tensors import SMALL, gpt_task, mine
from tests.engine.zoo import make
from tests.pool import run_threads


def deep_gpt() -> nn.Module:
    """Four blocks, for two stages on each of two ranks."""
    model = gpt.GPT(replace(SMALL, layers=4))
    fill(model, seed=3)
    return model


def frozen_gpt() -> nn.Module:
    """The blocks' norms and the table are not trained."""
    model = small_gpt()
    for name, p in model.named_parameters():
        p.requires_grad_("norm" not in name and "embed" not in name)
    return model


TASKS: dict[str, Callable[[], Task]] = {
    "gpt": partial(gpt_task, rows=8),
    "deep": lambda: Task(deep_gpt, partial(text, rows=16)),
    "tied": lambda: Task(tied_gpt),
    "frozen": lambda: Task(frozen_gpt),
    "stack": lambda: rows_task(partial(make, "stack")),
}
Both = tuple[list[Event], tuple[Event, ...]]


def both(world: World, plan: str, name: str, options: dict[str, Any]) -> Both:
    """The third step of a plan: measured and predicted."""
    task = TASKS[name]()
    options = {"units": "auto", "least_unit_bytes": 0, "clip": 1.0} | options
    named: dict[str, Any] = {"loss": task.loss, "optimizer": sw.AdamW(lr=1e-3), **options}
    engine = sw.parallelize(task.make(), plan, world, tokens=task.tokens, **named)
    batches = [share(task.batch(s), engine.data_rank, engine.data_ranks) for s in range(3)]
    for batch in batches[:2]:
        engine.step(batch)
    with measuring(engine, batches[2]) as meter:
        engine.step(batches[2])
    _, predicted = predict_events(
        task.make(), plan, batches[2], EngineOptions(**named), rank=world.rank
    )
    return meter.events, predicted


def check(ranks: list[Both]) -> None:
    """Every event of every rank, in the same order, with the same bytes."""
    for measured, predicted in ranks:
        assert [(*e[:3], {c: e.by_category[c] for c in PREDICTED}) for e in measured] == [
            e[:4] for e in predicted
        ]
        assert all(e.peak >= e.total >= sum(e.by_category[c] for c in PREDICTED) for e in measured)
        assert all(TEMPORARY not in e.by_category for e in predicted)


PLANS = [
    *(
        "dp2",
        "dp2 zero1 bf16",
        "dp2 zero2",
        "dp2 zero3",
        "dp4 zero3 bf16",
        "dp2 zero3 accumulate:2",
    ),
    *("dp2 zero2 accumulate:3", "dp_replicate2 dp_shard2 zero3", "tp2", "tp2 sp bf16"),
    *("dp2 tp2 zero3", "dp2 tp2 sp zero2 fp64", "dp2 zero3 recompute:full"),
    *("dp2 zero2 recompute:blocks.*.mlp accumulate:2", "dp2 tp2 sp zero1 recompute:full bf16"),
    *("dp2 zero3 tile:3", "dp2 zero3 tile:2=* accumulate:2 bf16"),
    *("dp2 row:S,R,S", "dp2 zero3 arenas offload:optim", "dp2 zero2 arenas accumulate:2"),
    *("dp2 zero2 offload:optim=0.6", "dp2 offload:optim accumulate:2", "dp2 zero3 offload:param"),
    "dp_replicate2 dp_shard2 zero3 offload:optim",
    # a unit that is always whole frees none before it, and its sum is in flight as others are
    *("dp2 zero1 | blocks.0: zero3", "dp2 zero3 accumulate:2 | blocks.1: ddp"),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize("plan", PLANS)
def test_every_event_is_predicted_to_the_byte(plan: str):
    """Parameters, gathered units, gradients, optimizer and kept activations, on every rank."""
    check(run_threads(ranks_of(plan), both, plan, "gpt", {}))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tied", {}),
        ("frozen", {}),
        ("stack", {"units": 1}),
        ("gpt", {"prefetch": 0}),
        ("gpt", {"prefetch": 3, "units": 1}),
        ("gpt", {"clip": None}),
        ("gpt", {"least_unit_bytes": None}),
    ],
)
def test_models_and_options(name: str, options: dict[str, Any]):
    """Tied and frozen parameters, other units, other prefetching, an update without a norm."""
    check(run_threads(2, both, "dp2 zero3 fp64", name, options))


def test_a_measurement_leaves_nothing_behind():
    """No hook, no watch: a step that is not measured runs what it ran before."""
    task = gpt_task()
    engine = sw.parallelize(task.make(), "fp32", alone(), loss=task.loss, tokens=task.tokens)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in engine.model.modules()]
    with measuring(engine, task.batch(0)) as meter:
        engine.step(task.batch(0))
    seen = len(meter.events)
    engine.step(task.batch(1))
    after = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in engine.model.modules()]
    assert after == hooks and not engine.optimizer.torch._optimizer_step_pre_hooks
    assert len(meter.events) == seen > 4


def pipelined(world: World, plan: str) -> list[Event]:
    task = gpt_task(rows=8)
    engine = sw.parallelize(task.make(), plan, world, loss=task.loss, tokens=task.tokens)
    engine.step(share(task.batch(0), engine.data_rank, engine.data_ranks))
    batch = share(task.batch(1), engine.data_rank, engine.data_ranks)
    with measuring(engine, batch) as meter:
        engine.step(batch)
    return meter.events


def test_the_actions_of_a_pipeline_are_events():
    """1F1B: the first stage keeps two microbatches' activations, the last one's none after B."""
    first, last = run_threads(2, pipelined, "pp2 1f1b:4 fp64")
    assert [e.kind for e in first[:4]] == ["F0.0", "F0.1", "B0.0", "F0.2"]
    kept = [e.by_category["kept"] for e in first if e.kind[0] in "FB"]
    one = kept[0]
    assert one > 0 and kept == [one, 2 * one, one, 2 * one, one, 2 * one, one, 0]
    assert [e.by_category["kept"] for e in last if e.kind[0] == "B"] == [0, 0, 0, 0]


PIPELINES = [
    *("pp2 1f1b:4 fp64", "pp2 gpipe:2", "pp2 interleaved:4x2 bf16", "dp2 pp2 zero1 1f1b:2"),
    *("pp2 tp2 1f1b:2", "pp2 1f1b:2 accumulate:2", "pp2 bfs:2x2"),
    *("pp2 1f1b:4 recompute:full", "dp2 pp2 zero1 interleaved:2x2 recompute:every2"),
    *("pp2 zb-h1:4", "pp2 zb-v:4 bf16", "pp2 dp2 zero1 dualpipe-v:4"),
    *("pp2 dp2 zero3 1f1b:4", "pp2 dp2 zero2 interleaved:2x2 accumulate:2"),
    *("pp2 dp2 zero3 zb-h1:4", "pp2 dp2 zero3 recompute:full 1f1b:2 offload:param"),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", PIPELINES)
def test_every_action_of_a_pipeline_is_predicted_to_the_byte(plan: str):
    """After each F, B, I and W of each rank: what its stages keep of the microbatches under way."""
    check(run_threads(ranks_of(plan), both, plan, "deep", {"clip": 1.0}))


@pytest.mark.parametrize(
    "plan",
    [
        "pp2 2bw:4",
        "activations:host",
        "dp2 offload:optim-delayed",
        "dp2 zero3 recompute:full arenas",
        "dp2 recompute:selective",
        "tp2 recompute:full",
        "pp2 tp2 zb-v:4",
    ],
)
def test_what_is_not_predicted_is_refused(plan: str):
    """The error says which plans are, and that a step can be measured."""
    task = gpt_task()
    with pytest.raises(InputError, match=r"a timeline of .* with .*--measure"):
        predict_events(task.make(), plan, task.batch(0), EngineOptions(loss=gpt.loss))


def recorded(world: World, plan: str) -> tuple[AllocationTrace, list[int], int]:
    """The third step of a plan: its trace, live bytes at its events, and the peak of the meter."""
    task, recorder = gpt_task(rows=16), MemoryRecorder()
    engine = sw.parallelize(task.make(), plan, world, loss=task.loss, least_unit_bytes=0, clip=1.0)
    for step in range(2):
        engine.step(mine(engine, task.batch(step)))
    with measuring(engine, batch := mine(engine, task.batch(2)), recorder) as meter:
        engine.step(batch)
    return recorder.trace, [event.total for event in meter.events], meter.most_bytes


def test_a_trace_has_the_bytes_of_the_meter():
    """At each event, and at the peak; each storage is allocated once and freed at most once."""
    for trace, totals, most in run_threads(2, recorded, "dp2 zero3 fp32 recompute:full"):
        live, seen = dict[int, int](), list[int]()
        for storage, stored_bytes, allocated in trace.changes:
            if not stored_bytes:
                seen.append(sum(live.values()))
            elif allocated:
                assert storage not in live
                live[storage] = stored_bytes
            else:
                assert live.pop(storage) == stored_bytes
        assert seen == totals
        assert max(totals) <= peak_bytes(trace.changes) <= most
