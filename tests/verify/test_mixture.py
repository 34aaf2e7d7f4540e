"""The oracle of mixtures computes what the layer computes, under every gate."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.plan.plan import Plan
from shardwise.models import gpt, moe
from shardwise.models.registry import find
from shardwise.models.trainable import Trainable
from shardwise.techniques.expert.apply import layers_of
from shardwise.techniques.expert.gate import GATES
from shardwise.techniques.expert.moe_layer import ExpertPlace, MoE, name_layers
from shardwise.verify import parity
from shardwise.verify.oracles.mixture_oracle import Follow, Mixture
from shardwise.verify.report import report
from tests.pool import run_threads
from tests.verify import micro

SMALL = (
    *("topk:1.25", "gshard:1", "noisy-topk:1:8:3", "expert-choice:1.5", "sigmoid:1:4:3"),
    "hash::6",
)


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
    layer, exact, rounded = (_first_layer(gate) for _ in range(3))
    for one in (layer, rounded):
        _round(one)
    torch.manual_seed(0)
    x = torch.randn(512, 64, dtype=torch.float64)
    ids = torch.arange(512) % 4 if gate.startswith(("hash", "assigned")) else None
    seen = _chosen(layer, layer, x, ids)
    followed: list[Follow] = []
    for one in (exact, rounded):
        followed.append(Follow(seen.experts, seen.positions))
        mixture = Mixture(one)
        mixture.follow(followed[-1:])
        chosen = _chosen(one, mixture, x, ids)
        assert torch.equal(chosen.experts, seen.experts)
        assert torch.equal(chosen.positions, seen.positions)
    scores = zip(*(follow.scores for follow in followed), strict=True)
    error = max((float((a - b).abs().max()) for a, b in scores), default=0.0)
    assert followed[0].gap <= 2 * error
    assert followed[1].gap == 0


def _first_layer(gate: str) -> MoE:
    model = find(f"moe:{gate}").build().double()
    name_layers(model)
    return next(iter(layers_of(model).values()))


@torch.no_grad()
def _round(layer: MoE) -> None:
    """Round what scores the experts to 16 bits."""
    for name, x in [*layer.named_parameters(), *layer.named_buffers()]:
        if name.startswith(("router", "spread", "centroids")):
            x.copy_(x.bfloat16())


def _chosen(layer: MoE, forward: Callable[..., Any], x: Tensor, ids: Tensor | None) -> Any:
    """The choices in a pass of the layer."""
    seen: list[Any] = []
    layer.place = replace(layer.place, on_routing=seen.append)
    forward(x, ids)
    return seen[0]


def unnamed(gate: str) -> nn.Module:
    """A mixture as a user's model, whose layers have no names of their own."""
    made = micro.mixture(gate, None)
    for layer in layers_of(made).values():
        layer.place = ExpertPlace()
    return made


@pytest.mark.full
@pytest.mark.parametrize("gate", ["gshard", "noisy-topk"])
def test_layers_of_a_users_model_hold(gate: str):
    """The oracle's layers get the names of the run's, and so draw the same random numbers."""
    plan = Plan.parse("dp2 ep2 fp64")
    own = Trainable(gate, partial(unnamed, gate), moe.loss, micro.text, gpt.tokens)
    with patch.object(parity, "find", lambda _: own):
        assert report(plan, "moe", run_threads(2, parity.prove, plan, "moe", 1)).holds
