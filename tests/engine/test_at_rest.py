"""Parameters at rest have as many dimensions as before, so that a choice by p.ndim is the same."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.comm.world import World
from tests.engine.cases import (
    difference,
)
from tests.engine.loops import Side, wrap
from tests.engine.zoo import dims
from tests.pool import run_gloo, run_threads

SHARDED = ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The usual split: matrices decay, vectors do not; the scalar has a rate of its own."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in named.values() if p.ndim == 1]},
        {"params": [p for p in named.values() if p.ndim == 0], "lr": 0.2},
    ]


def looped(side: Side, optim: Any) -> dict[str, Tensor]:
    for step in range(3):
        side.backward(step)
        side.clip(0.3)
        optim.step()
        optim.zero_grad()
    return dict(side.model.state_dict())


def names(model: nn.Module, optim: Any) -> list[list[str]]:
    known = {id(p): name for name, p in model.named_parameters()}
    return [[known[id(p)] for p in group["params"]] for group in optim.param_groups]


def wrapped_loop(world: World, how: str, when: str) -> tuple[dict[str, Tensor], Any, Any]:
    model = dims()
    early = torch.optim.AdamW(two_groups(model), lr=0.05, weight_decay=0.0)
    model = wrap(how, model, world)
    late = torch.optim.AdamW(two_groups(model), lr=0.05, weight_decay=0.0)
    optim = early if when == "before" else late
    found = looped(Side(model, [world.rank], world.size, True), optim)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return found, names(model, optim), shapes


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["DDP", *SHARDED])
def test_an_optimizer_with_groups_by_dimensions_trains_as_on_a_plain_module(how: str, when: str):
    """Made before or after the wrapping; with clipping, which reads gradients at rest."""
    ranks = 4 if how == "HYBRID_SHARD" else 2
    plain = dims()
    optim = torch.optim.AdamW(two_groups(plain), lr=0.05, weight_decay=0.0)
    groups = names(plain, optim)
    expected = looped(Side(plain, list(range(ranks)), ranks, False), optim)
    runner = run_gloo if (how, when) == ("FULL_SHARD", "after") else run_threads
    found = runner(ranks, wrapped_loop, how, when)
    for weights, own, shapes in found:
        assert own[0] == groups[0]
        assert own[1] == groups[1] or "last.scale" in own[1]  # [0] where another rank holds it
        for name, p in plain.named_parameters():
            assert difference(weights[name], expected[name]) <= 1e-10, name
            assert len(shapes[name]) == p.dim() or (name == "last.scale" and shapes[name] == (0,))
    holders = [own for _, own, _ in found if own[2] == ["last.scale"]]
    assert holders, "nobody holds the scalar without dimensions"
