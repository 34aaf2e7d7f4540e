"""The MoE GPT by its numbers: parameters, operations, configuration."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.models import decoder, moe
from shardwise.models.moe import MoEConfig, MoEGPT
from shardwise.models.registry import find
from shardwise.techniques.expert.gate import GATES, Gate
from shardwise.techniques.expert.moe_layer import MoE
from shardwise.train.config import ModelSection, read
from shardwise.train.sizes import model_sizes, require_fit

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shared", [0, 2])
def test_parameters_by_arithmetic(gate: str, shared: int):
    """The formula counts the parameters that the model has."""
    config = MoEConfig(moe.TINY, Gate(gate, 6, GATES[gate] or 3), shared)
    with torch.device("meta"):
        model = MoEGPT(config)
    assert moe.parameters(config) == sum(p.numel() for p in model.parameters())


def test_operations_do_not_grow_with_experts():
    """From 4 to 64 experts at k = 2 the operations per token grow by the routers alone: 1 %."""
    few, many = (
        moe.flops_per_token(MoEConfig(moe.TINY, Gate("topk", experts, 2))) for experts in (4, 64)
    )
    assert many - few == 6 * moe.TINY.layers * moe.TINY.width * 60
    wide = replace(moe.TINY, width=512, hidden=2048, heads=8)
    few, many = (
        moe.flops_per_token(MoEConfig(wide, Gate("topk", experts, 2))) for experts in (4, 64)
    )
    assert many / few < 1.01


def test_example():
    """examples/moe.toml trains as many operations per token as quickstart.toml, routers apart."""
    sizes, dense = (
        model_sizes(read(EXAMPLES / name).model, 256) for name in ("moe.toml", "quickstart.toml")
    )
    assert isinstance(sizes, MoEConfig)
    assert (sizes.gate.experts, sizes.gate.k) == (8, 2)
    routers = 6 * sizes.layers * sizes.gpt.width * 8
    assert decoder.flops_per_token(sizes) - routers == decoder.flops_per_token(dense)
    assert decoder.parameters(sizes) > 2 * decoder.parameters(dense)
    require_fit(sizes, Plan.parse("dp2 ep2 zero3"))


@pytest.mark.parametrize(
    ("keys", "given"),
    [
        ({"experts": 4, "gate": "swich"}, 'the gate "swich"'),
        ({"experts": 4, "experts_per_token": 5}, "k=5 with 4 experts"),
        ({"experts": 4, "gate": "argmax"}, "model.gate = 'argmax'"),
    ],
)
def test_wrong_keys(keys: dict[str, object], given: str):
    """A mixture that cannot work is refused before anything starts."""
    with pytest.raises(InputError) as error:
        model_sizes(ModelSection(**keys), 256)  # type: ignore[arg-type]
    assert given in str(error.value)


def test_experts_that_do_not_fit_the_plan():
    """So is a degree that does not divide the experts."""
    sizes = model_sizes(ModelSection(experts=6), 256)
    with pytest.raises(InputError, match=r"'ep4' with 6 experts in blocks\.0\.moe"):
        require_fit(sizes, Plan.parse("dp4 ep4"))


def test_sizes_after_the_gate():
    """After the gate come a capacity, the experts and those of a token; an empty one is unset."""
    gates = [moe.tiny(text).gate for text in ("topk", "topk:1.25", "topk::8:3", "switch:2:6")]
    assert [(g.capacity, g.experts, g.k) for g in gates] == [
        (None, 4, 2),
        (1.25, 4, 2),
        (None, 8, 3),
        (2.0, 6, 1),
    ]


def test_clusters_are_fitted_on_a_first_pass():
    """The model `moe:cluster` has centroids of every layer, and its clusters are all used."""
    made = find("moe:cluster")
    model, again = made.build(), made.build()
    batch = made.batch(8, 0)
    made.loss(model, batch)
    layers = [m for m in model.modules() if isinstance(m, MoE)]
    assert len(layers) == 2
    for layer in layers:
        assert layer.load is not None
        assert min(layer.load.computed) > 0
    for name, b in model.named_buffers():
        assert torch.equal(b, again.get_buffer(name))
