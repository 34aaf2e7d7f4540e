"""Proofs of every gate, with more than one data rank, on threads."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.plan import Plan
from shardwise.engine.expert_parallel import layers_of
from shardwise.models import gpt, moe
from shardwise.models.initial import fill
from shardwise.models.trainable import Trainable
from shardwise.parallel.expert.gate import FIXED, GATES, Gate
from shardwise.parallel.expert.layer import Place
from shardwise.verify import parity
from shardwise.verify.report import Report, report
from tests.pool import run_threads
from tests.verify import micro


def model(config: moe.MoEConfig) -> nn.Module:
    """A MoE GPT whose routing changes from one step to the next."""
    made = moe.MoEGPT(config)
    fill(made, seed=3)
    for block in made.blocks:
        assert isinstance(block, moe.MoEBlock)
        block.moe.bias_rate = 0.3
        if config.gate.name == "cluster":
            places = torch.linspace(-1, 1, 4 * config.gpt.width).sin()
            block.moe.get_buffer("centroids").copy_(places.view(4, -1))
    return made


def unnamed(config: moe.MoEConfig) -> nn.Module:
    """The same as a user's model, whose layers have no names of their own."""
    made = model(config)
    for layer in layers_of(made).values():
        layer.place = Place()
    return made


def batch(config: moe.MoEConfig, rows: int, seed: int) -> dict[str, Tensor]:
    return micro.text(rows, seed) | {
        name: value % 4
        for name, value in moe.batch(rows, config, seed).items()
        if name == "experts"
    }


def proved(
    plan: str,
    gate: str,
    capacity: float | None,
    model: Callable[[moe.MoEConfig], nn.Module] = model,
) -> Report:
    """A proof of one step of a small MoE GPT, on threads."""
    losses = {} if gate in FIXED else {"balance": 0.3, "importance": 0.2, "z": 0.1}
    chosen = Gate(gate, 4, GATES[gate] or 2, capacity, losses=losses)
    config = moe.MoEConfig(micro.CONFIG, chosen, shared=1)
    found = Trainable(gate, partial(model, config), moe.loss, partial(batch, config), gpt.tokens)
    parsed = Plan.parse(f"{plan} fp64")
    with patch.object(parity, "find", lambda _: found):
        return report(parsed, "moe", run_threads(parsed.size, parity.prove, parsed, "moe", 1))


@pytest.mark.full
@pytest.mark.parametrize("gate", ["gshard", "noisy-topk"])
def test_layers_of_a_users_model_hold(gate: str):
    """The oracle's layers get the names of the run's, and so draw the same random numbers."""
    assert proved("dp2 ep2", gate, None, unnamed).holds
