"""verify proves what holds, and names what does not."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.core.plan import Plan
from shardwise.engine.engine import Engine
from shardwise.models.registry import find
from shardwise.parallel.flat import Flat
from shardwise.train.proof import Finding, compare, engine_of, prove
from shardwise.train.verify import Report, report, show, verify
from tests.pool import run_gloo, run_threads

PLANS = [
    *("dp2 fp64", "dp2 zero1 fp64", "dp2 zero2 fp64", "dp2 zero3 fp64", "dp4 zero3 bf16"),
    *("dp2 zero3 fp16", "dp2 zero1 fp32", "dp_replicate2 dp_shard2 zero3 fp64"),
    "dp2 zero2 accumulate:2 fp64",
]


def on_gloo(plan: str, model: str = "gpt") -> Report:
    read = Plan.parse(plan)
    return report(read, model, run_gloo(read.size, prove, read, model, 3))


@pytest.mark.parametrize("plan", PLANS)
def test_plans_hold(plan: str):
    """Parity, bytes and memory hold on real processes."""
    found = on_gloo(plan)
    assert found.holds and found.first_difference is None


@pytest.mark.parametrize("model", ["gpt2", "llama", "bert", "mistral", "qwen3", "t5"])
def test_models_of_transformers_hold(model: str):
    """Tied embeddings, encoders, decoders: sharded, they are what one process computes."""
    pytest.importorskip("transformers")
    assert on_gloo("dp2 zero3 fp64", f"hf:{model}").holds


def broken(world: World, name: str) -> Finding:
    """Rank 1 doubles its piece of one gradient after the sum, before the update."""
    plan, trainable = Plan.parse("dp2 fp64"), find("gpt")
    ours = engine_of(trainable, plan, world)
    if world.rank == 1:
        break_gradient(ours, name)
    return compare(ours, engine_of(trainable, Plan.parse("fp64"), alone()), trainable.batch, 2)


def break_gradient(engine: Engine, name: str) -> None:
    update, param = engine.optimizer.step, engine.model.get_parameter(name)

    def step(flats: Sequence[Flat], factor: float = 1.0) -> None:
        if any(param is p for flat in flats for p in flat.params):
            assert param.grad is not None
            param.grad.mul_(2)
        update(flats, factor)

    engine.optimizer.step = step


def test_a_broken_gradient_is_named_with_its_rank():
    """One gradient doubled on rank 1 is found: its name, its rank, an error of one."""
    name = "blocks.2.mlp.up.weight"
    found = report(Plan.parse("dp2 fp64"), "gpt", run_threads(2, broken, name))
    first = found.first_difference
    assert not found.holds and first is not None
    assert (first.kind, first.name, first.rank) == ("gradients", name, 1)
    assert first.error == pytest.approx(1.0)
    shown = Console(record=True, width=200)
    show(found, shown)
    assert f"{name}, on rank 1" in shown.export_text()


def miscounted(world: World) -> Finding:
    """A rank that sends eight bytes more than it should."""
    plan, trainable = Plan.parse("dp2 fp64"), find("gpt")
    ours = engine_of(trainable, plan, world)
    hear = ours.data.hear

    def talkative(used: Tensor) -> None:
        hear(used)
        ours.data.agree_on(torch.zeros(1, dtype=torch.float64), ours.axes[1])

    ours.data.hear = talkative
    return compare(ours, engine_of(trainable, Plan.parse("fp64"), alone()), trainable.batch, 1)


def test_bytes_that_were_not_predicted_are_found():
    """One message of eight bytes too many and the plan does not hold, though all values do."""
    found = report(Plan.parse("dp2 fp64"), "gpt", run_threads(2, miscounted))
    assert not found.holds and found.first_difference is None
    assert sum(found.sent["measured"].values()) == sum(found.sent["predicted"].values()) + 8


def test_json_has_exactly_these_keys():
    """The object that scripts read, from processes that verify starts itself."""
    found: dict[str, Any] = json.loads(verify("dp2 zero2", "gpt", steps=1).json())
    keys = ["plan", "model", "holds", "parity", "bytes", "memory", "first_difference"]
    assert list(found) == keys
    assert found["plan"] == "dp2 zero2 fp64" and found["holds"]
    assert list(found["parity"]) == ["loss", "gradients", "weights"]
    assert found["bytes"]["measured"] == found["bytes"]["predicted"]
    assert found["memory"]["measured"] == found["memory"]["predicted"]


@pytest.mark.parametrize(
    ("plan", "model", "steps"),
    [("dp2 zero9", "gpt", 3), ("dp2", "hf:lama", 3), ("dp2", "gpt", 0), ("tp2", "gpt", 3)],
)
def test_bad_input_is_refused_before_anything_starts(plan: str, model: str, steps: int):
    """An unknown word, an unknown model, no steps, a plan that cannot run yet."""
    with pytest.raises(InputError):
        verify(plan, model, steps)
