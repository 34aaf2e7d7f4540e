"""The memory of a step at each of its events, what is kept after it, and what is found of it."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.zero import PREDICTED, Event
from shardwise.engine.options import EngineOptions
from shardwise.models import gpt
from shardwise.models.trainable import fill
from shardwise.observe.dry_twin import predict_events
from shardwise.observe.meter import Live, Stray, measuring
from tests.engine.cases import (
    Case,
    Task,
    ranks_of,
    rows_task,
    settled,
    share,
    small_gpt,
    squares,
    text,
    tied_gpt,
    vectors,
)
from tests.engine.pipelines import WIDTH
from tests.engine.tensors import ADAMW, SHAPES, gpt_task, holds
from tests.engine.zoo import Stack, make
from tests.pool import run_threads


def deep_gpt() -> nn.Module:
    """Four blocks, for two stages on each of two ranks."""
    model = gpt.GPT(replace(SHAPES["untied"], layers=4))
    fill(model, seed=3)
    return model


def frozen_gpt() -> nn.Module:
    """The blocks' norms and the table are not trained."""
    model = small_gpt()
    for name, p in model.named_parameters():
        p.requires_grad_("norm" not in name and "embed" not in name)
    return model


class Siblings(nn.Module):
    """A block of three units: two read one input, and each is called twice, in turn. Between the
    calls there is attention without a dim of heads, which no kernel of the CPU fuses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.tanh(self.a(x)), torch.tanh(self.b(x))
        q, k = (y.unflatten(-1, (3, 2)) for y in (left, right))
        both = torch.tanh(self.a(functional.scaled_dot_product_attention(q, k, q).flatten(-2)))
        return x + self.c(torch.tanh(self.b(both)) * left)


def siblings() -> nn.Module:
    return settled(Stack(*(Siblings() for _ in range(4))))


TASKS: dict[str, Callable[[], Task]] = {
    "gpt": partial(gpt_task, rows=8),
    "deep": lambda: Task(deep_gpt, partial(text, rows=16)),
    "tied": lambda: Task(tied_gpt),
    "frozen": lambda: Task(frozen_gpt),
    "stack": lambda: rows_task(partial(make, "stack")),
    "siblings": lambda: rows_task(siblings, partial(vectors, rows=16)),
}
Both = tuple[list[Event], tuple[Event, ...]]


def both(world: World, plan: str, name: str, options: dict[str, Any]) -> Both:
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


PLANS = [
    *("dp2 zero3 bf16", "tp2 sp bf16", "dp2 zero2 accumulate:3", "dp2 zero3 accumulate:2"),
    *("dp_replicate2 dp_shard2 zero3 offload:optim", "dp2 tp2 sp zero2 fp64", "dp2 row:S,R,S"),
    *("dp2 zero1 recompute:blocks.*.mlp accumulate:2", "dp2 zero3 recompute:full"),
    *("dp2 zero3 tile:2=* accumulate:2 bf16", "dp2 zero3 arenas offload:optim"),
    *("dp2 zero2 offload:optim", "dp2 offload:optim accumulate:2", "dp2 zero3 offload:param"),
    # a unit that is always whole frees none before it, and its sum is in flight as others are
    *("dp2 zero1 | blocks.0: zero3", "dp2 zero3 accumulate:2 | blocks.1: ddp"),
    *("dp2 zero3 recompute:selective accumulate:2", "dp2 zero3 recompute:128KiB"),
    *("tp2 recompute:full", "tp2 recompute:partitioned", "dp2 activations:host", "cp2 zero3"),
    *("dp2 zero3 recompute:full arenas", "dp2 | head: tp2"),
]
PIPELINES = [
    *("pp2 dp2 zero3 1f1b:4", "pp2 zb-v:4 bf16", "pp2 interleaved:4x2", "pp2 dp2 zero3 zb-h1:4"),
    *("pp2 gpipe:2", "pp2 tp2 1f1b:2", "pp2 1f1b:2 accumulate:2", "pp2 bfs:2x2"),
    *("dp2 pp2 zero1 interleaved:2x2 recompute:every2", "pp2 dp2 zero1 dualpipe-v:4"),
    *("pp2 dp2 zero2 interleaved:2x2 accumulate:2", "pp2 tp2 zb-v:4"),
    *("pp2 dp2 zero3 recompute:full 1f1b:2 offload:param", "pp2 1f1b:4 activations:host"),
]
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *(("tied", {}), ("frozen", {}), ("stack", {"units": 1}), ("gpt", {"prefetch": 0})),
    ("gpt", {"prefetch": 3, "units": 1, "clip": None, "least_unit_bytes": None}),
]
EVENTS = [
    *((plan, "gpt", {}) for plan in PLANS),
    *((plan, "deep", {}) for plan in PIPELINES),
    *(("dp2 zero3 fp64", *of) for of in OPTIONS),
    *((f"pp2 dp2 zero3 {word} fp64", "siblings", {}) for word in ("1f1b:4", "zb-h1:4", "zb-v:4")),
    *((plan, "gpt", {"clip": None}) for plan in ("pp2 pipedream:4", "pp2 2bw:4")),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("plan", "name", "options"), EVENTS)
def test_every_event_is_predicted_to_the_byte(plan: str, name: str, options: dict[str, Any]):
    """Of every rank, in the same order, with the same bytes of each category after each action."""
    found_as_predicted(plan, name, options)


def found_as_predicted(plan: str, name: str, options: dict[str, Any]) -> list[list[Event]]:
    """The events of each rank, which are those predicted."""
    found = run_threads(ranks_of(plan), both, plan, name, options)
    for measured, predicted in found:
        own, foreseen = (
            [(*e[:3], {c: e.by_category[c] for c in PREDICTED}) for e in events]
            for events in (measured, predicted)
        )
        assert own == foreseen
        assert all(e.peak >= e.total for e in measured)
    return [measured for measured, _ in found]


def test_the_actions_of_a_pipeline_are_events():
    """1F1B: the first stage keeps two microbatches' activations, the last one's none after B."""
    first, last = found_as_predicted("pp2 1f1b:4 fp64", "gpt", {})
    assert [e.kind for e in first[:4]] == ["F0.0", "F0.1", "B0.0", "F0.2"]
    kept = [e.by_category["kept"] for e in first if e.kind[0] in "FB"]
    one = kept[0]
    assert one > 0 and kept == [one, 2 * one, one, 2 * one, one, 2 * one, one, 0]
    assert [e.by_category["kept"] for e in last if e.kind[0] == "B"] == [0, 0, 0, 0]


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


# --- units and arenas -----------------------------------------------------------------------------


def test_units_that_read_one_input():
    """A unit is freed after its last use in a half of a backward pass, and not gathered again."""
    holds(run_threads, TASKS["siblings"](), Case("pp2 dp2 zero3 zb-h1:4 fp64", **ADAMW))


def test_another_shape_gets_another_arena():
    """The arena of a batch has the size that is predicted for it, whatever came before."""
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    options: dict[str, Any] = {"loss": squares, "optimizer": sw.SGD(lr=0.1)}
    plan = "dp1 recompute:0,1,2 arenas fp32"
    engine = sw.parallelize(deepcopy(plain), plan, alone(), **options)
    for rows in (4, 64, 4):
        x = torch.randn(rows, 8)
        engine.step(x)
        told = sw.predict(plain, plan, x, **options)
        assert engine.memory()["buffers"] == told.memory["buffers"] > 0


# --- what is kept is found ------------------------------------------------------------------------


def engine_alone() -> sw.Engine:
    return sw.parallelize(small_gpt(), "fp32", alone(), loss=gpt.loss, tokens=gpt.tokens)


def test_a_leak_is_found():
    """A tensor the loss keeps is a leak; the report names what made it, and its bytes."""
    ours, kept = engine_alone(), []
    ours.model.get_submodule("blocks.1").register_forward_hook(
        lambda _, __, out: kept.append(out.detach() * 2)
    )
    live = Live()
    for step in range(2):
        with live:
            ours.step(text(step))
    assert live.unaccounted(ours) == [Stray(x.nbytes, "aten.mul.Tensor") for x in kept]
