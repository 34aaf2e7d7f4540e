"""The oracle of mixtures computes what the layer computes, under every gate."""

import pytest
import torch

from shardwise.engine.expert_parallel import layers_of
from shardwise.models.registry import find
from shardwise.parallel.expert.gate import GATES
from shardwise.parallel.expert.layer import name_layers
from shardwise.verify.mixture_oracle import Mixture

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
