"""The predictions of a search, from few recorded passes: what each plan's own prediction has."""

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.core.model_spec import Blocks
from shardwise.core.plan.plan import Plan
from shardwise.derive import repeated
from shardwise.derive.recorded_model import RecordedModel
from shardwise.engine.options import EngineOptions
from shardwise.engine.predict import predict_with
from shardwise.models import gpt, moe
from shardwise.prediction.cluster_presets import PRESETS
from shardwise.techniques.expert.gate import Gate

DEEP = gpt.GPTConfig(64, 10, 16, heads=4, kv_heads=2, hidden=32, sequence=16)
TIED = dataclasses.replace(DEEP, tied=True)
EXPERTS = moe.MoEConfig(dataclasses.replace(DEEP, layers=8), Gate("topk", experts=4, k=2))
PLANS = [
    ("dp4 zero3 accumulate:2 bf16", 2),
    ("dp2 tp2 sp zero1 accumulate:1 recompute:selective bf16", 1),
    ("dp1 cp2 zero2 accumulate:1 bf16", 1),
    ("pp3 dp2 zero3 1f1b:4 recompute:full bf16", 1),
    ("pp2 dp1 tp2 sp interleaved:2x2 bf16", 2),
    ("pp5 dp1 zb-h1:6 offload:optim bf16", 1),
    ("pp3 dp2 zero3 1f1b:4 stages:1,5,4 bf16", 1),
    ("pp2 dp1 tp2 sp interleaved:2x2 stages:1,2,3,4 recompute:full bf16", 2),
]


def options(loss: Any) -> EngineOptions:
    return EngineOptions(loss=loss, clip=1.0, least_unit_bytes=0, kernels="cuda")


def on_meta(build: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        return build(config)


def text(rows: int) -> dict[str, Any]:
    tokens = torch.zeros(rows, DEEP.sequence, dtype=torch.long)
    return {"inputs": tokens, "targets": tokens}


def costs(found: Any) -> dict[str, Any]:
    """What a search and its user read of a prediction."""
    names = ("memory", "host_memory", "activations", "device_peak", "bytes", "messages", "notes")
    values = {name: getattr(found, name) for name in names}
    return values | {"time": found.step_time(PRESETS["h100-sxm"])}


@pytest.mark.parametrize(("text_", "rows"), PLANS, ids=[plan for plan, _ in PLANS])
@pytest.mark.parametrize("config", [DEEP, TIED], ids=["untied", "tied"])
def test_a_derived_prediction_is_that_of_the_plan(config: Any, text_: str, rows: int) -> None:
    """Memory, peak, bytes, messages and time, on the first and on the last rank of the pipeline."""
    plan, model = Plan.parse(text_), on_meta(gpt.GPT, config)
    derived = RecordedModel(model, text(1), options(gpt.loss))
    assert derived.blocks == Blocks("blocks", config.layers)
    last = plan.mesh.line("pp", 0)[-1]
    own = predict_with(model, plan, text(rows * plan.microbatches), options(gpt.loss))
    for rank in sorted({0, last}):
        alone = own.on(rank) if rank else own
        assert costs(derived.of(plan, rows, rank)) == costs(alone), rank
    assert derived.short.keys() == set(repeated.DEPTHS)


def test_cuts_have_predictions_of_their_own() -> None:
    """Of one model, asked in turn for plans that differ in the blocks of stages alone."""
    model = on_meta(gpt.GPT, DEEP)
    derived, found = RecordedModel(model, text(1), options(gpt.loss)), list[dict[str, Any]]()
    for word in ("", "stages:2,2,6", "stages:6,2,2"):
        plan = Plan.parse(f"pp3 dp2 zero3 1f1b:4 {word} bf16")
        own = predict_with(model, plan, text(plan.microbatches), options(gpt.loss))
        found.append(costs(derived.of(plan, 1)))
        assert found[-1] == costs(own), word
    assert all(one["device_peak"] != other["device_peak"] for one, other in pairwise(found))


@pytest.mark.parametrize("text_", ["dp4 ep2 zero1 accumulate:1 bf16", "pp2 dp2 ep2 1f1b:2 bf16"])
def test_a_derived_prediction_of_experts_is_that_of_the_plan(text_: str) -> None:
    """The same of a mixture of experts on the axis ep."""
    plan, model = Plan.parse(text_), on_meta(moe.MoEGPT, EXPERTS)
    derived = RecordedModel(model, text(1), options(moe.loss))
    own = predict_with(model, plan, text(plan.microbatches), options(moe.loss))
    assert costs(derived.of(plan, 1)) == costs(own)
    assert derived.short


class Numbered(nn.Module):
    """A block whose forward depends on its number in a way that is no line."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every fourth block computes once more."""
        x = self.linear(x)
        return x if self.number % 4 else torch.relu(self.linear(x))


class Stack(nn.Module):
    """Ten blocks, of which the last may be larger."""

    def __init__(self, last: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Numbered(k) for k in range(10))
        if last is not None:
            self.blocks[9] = Numbered(last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From [B, 8] to a number."""
        for block in self.blocks:
            x = block(x)
        return x.sum()


def test_blocks_that_differ_are_recorded_one_by_one() -> None:
    """A copy with few blocks does not tell the pass of a model whose blocks are no line."""
    model, x = Stack(), torch.zeros(1, 8)
    derived = RecordedModel(model, x, EngineOptions())
    assert derived.blocks == Blocks("blocks", 10)
    plan = Plan.parse("dp2 zero3 bf16")
    assert costs(derived.of(plan, 1)) == costs(predict_with(model, plan, x, EngineOptions()))
    assert repeated.equal_blocks(Stack(last=4)) is None
    shared = Stack()
    shared.blocks[8] = shared.blocks[0]
    assert repeated.equal_blocks(shared) is None
