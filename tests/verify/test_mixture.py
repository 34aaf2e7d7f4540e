"""The oracle of mixtures computes what the layer computes, under every gate."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.engine.expert_parallel import layers_of
from shardwise.models.registry import find
from shardwise.parallel.expert.gate import GATES
from shardwise.parallel.expert.layer import name_layers
from shardwise.parallel.expert.routing import Routing
from shardwise.verify.mixture_oracle import Follow, Mixture

SMALL = ("topk:1.25", "gshard:1", "noisy-topk:1:8:3", "expert-choice:1.5", "sigmoid:1:4:3")


@pytest.mark.parametrize("gate", [*GATES, *SMALL])
def test_the_oracle_is_the_layer(gate: str):
    """Loss, gradients and buffers of two steps, and the loss of an evaluation."""
    trainable = find(f"moe:{gate}")
    layer, oracle = (trainable.build().double() for _ in range(2))
    for model in (layer, oracle):
        name_layers(model)
    for one in layers_of(oracle).values():
        one.forward = Mixture(one)
    for step in range(2):
        batch = trainable.batch(2, step)
        losses = [trainable.loss(model, batch) for model in (layer, oracle)]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
        found, wanted = (
            torch.autograd.grad(
                loss, [*model.parameters()], materialize_grads=True, allow_unused=True
            )
            for loss, model in zip(losses, (layer, oracle), strict=True)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close([*layer.buffers()], [*oracle.buffers()], rtol=0, atol=0)
    evaluated = [trainable.loss(model.eval(), batch) for model in (layer, oracle)]
    torch.testing.assert_close(*evaluated, rtol=1e-12, atol=0)


@pytest.mark.parametrize("gate", [*GATES, *SMALL])
def test_the_oracle_follows_choices_that_are_nearly_ties(gate: str):
    """It takes the choices of a layer with rounded logits, which are as near as the rounding."""
    trainable = find(f"moe:{gate}")
    layer, oracle, rounded = (next(iter(layers_of(_named(trainable)).values())) for _ in range(3))
    for one in (oracle, rounded):
        one.forward = Mixture(one)
    with torch.no_grad():
        for one in (layer, rounded):
            for name, p in [*one.named_parameters(), *one.named_buffers()]:
                if name.startswith(("router", "spread", "centroids")):
                    p.copy_(p.bfloat16())
    seen: list[Routing] = []
    layer.place = replace(layer.place, on_routing=seen.append)
    torch.manual_seed(0)
    x = torch.randn(512, layer.router.in_features if layer.router else 64, dtype=torch.float64)
    ids = torch.arange(512) % 4 if gate in ("hash", "assigned") else None
    layer(x, ids)
    passes = [Follow(seen[0].experts, seen[0].positions) for _ in range(2)]
    chosen: list[Any] = []
    oracle.place = replace(oracle.place, on_routing=chosen.append)
    for one, follow in zip((oracle, rounded), passes, strict=True):
        one.forward.follow([follow])
        one(x, ids)
    assert torch.equal(chosen[0].experts, seen[0].experts)
    assert torch.equal(chosen[0].positions, seen[0].positions)
    scores = zip(passes[0].scores, passes[1].scores, strict=True)
    error = max((float((a - b).abs().max()) for a, b in scores), default=0.0)
    assert passes[0].gap <= 2 * error
    assert passes[1].gap == 0


def _named(trainable: Any) -> Any:
    model = trainable.build().double()
    name_layers(model)
    return model
