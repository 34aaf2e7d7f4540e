"""Gradients that are differentiated in turn, and optimizers that step in the backward pass."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import RankError
from tests.engine.cases import difference, refusal, squares
from tests.engine.loops import rows, wrap
from tests.engine.tensors import full_parameters
from tests.engine.zoo import make
from tests.pool import run_gloo, run_threads


def apply_in_backward(optimizer: Any, model: nn.Module, **options: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as the package is imported
        from torch.distributed.optim.apply_optimizer_in_backward import (
            _apply_optimizer_in_backward,
        )
    _apply_optimizer_in_backward(optimizer, model.parameters(), options)


class Wide(nn.Module):
    """A table, a norm and a layer that are large enough to be taken over; bilinear in weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(600, 128), nn.RMSNorm(128)
        self.up, self.down = nn.Linear(128, 520), nn.Linear(520, 2)
        self.unused = nn.Linear(2, 2)
        own = torch.Generator().manual_seed(3)  # ranks that are threads share torch's own
        for p in self.parameters():
            nn.init.normal_(p, std=0.1, generator=own)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(self.table(ids)))))


def ids(step: int, rank: int) -> Tensor:
    return torch.randint(600, (6,), generator=torch.Generator().manual_seed(10 * step + rank))


def of_grads(side: nn.Module, shares: list[int], scale: float, step: int) -> None:
    """backward(create_graph=True), then the squares of what it left on the parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: a reference cycle of a parameter and its gradient
        if len(shares) == 1:
            side(ids(step, shares[0])).square().mean().backward(create_graph=True)
        else:
            losses = [side(ids(step, rank)).square().mean() * scale for rank in shares]
            torch.stack(losses).sum().backward(create_graph=True)
    grads = [p.grad for p in side.parameters() if p.grad is not None]
    torch.stack([g.square().sum() for g in grads]).sum().backward()


def by_grad(side: nn.Module, shares: list[int], scale: float, step: int) -> None:
    """A penalty on each rank's own gradient, by torch.autograd.grad, beside the loss."""
    used = [p for name, p in side.named_parameters() if "unused" not in name]
    for rank in shares:
        loss = side(ids(step, rank)).square().mean()
        grads = torch.autograd.grad(loss, used, create_graph=True)
        penalty = torch.stack([g.square().sum() for g in grads]).sum()
        ((loss + 0.1 * penalty) * scale).backward()


PENALTIES = {"of p.grad": of_grads, "of autograd.grad": by_grad}


def trained(model: nn.Module, shares: list[int], scale: float, how: str) -> dict[str, Tensor]:
    optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        PENALTIES[how](model, shares, scale, step)
        optim.step()
        optim.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def on_rank(world: World, how: str) -> dict[str, Tensor]:
    return trained(sw.DDP(Wide().double(), world, bucket_bytes=2**18), [world.rank], 1.0, how)


@pytest.mark.parametrize("run", [run_threads, run_gloo])
@pytest.mark.parametrize("how", PENALTIES)
def test_a_gradient_penalty_is_that_of_one_process(how: str, run: Any):
    """Double backward under DDP: weights of one process with the mean of all ranks' losses."""
    expected = trained(Wide().double(), [0, 1], 0.5, how)
    for found in run(2, on_rank, how):
        for name, weight in expected.items():
            assert difference(found[name], weight) <= 1e-10, name


def accumulated(world: World) -> Tensor:
    """Two passes that are differentiated in turn, added up on the parameter."""
    layer = nn.Linear(2, 1, bias=False).double()
    nn.init.ones_(layer.weight)
    sw.DDP(layer, world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in (1.0, 2.0):
            x = torch.full((1, 2), k + world.rank, dtype=torch.float64)
            layer(x).square().sum().backward(create_graph=True)
    assert layer.weight.grad is not None
    grad = layer.weight.grad
    (hessian,) = torch.autograd.grad(grad.sum(), layer.weight)
    return torch.cat([grad.detach(), hessian])


def test_gradients_of_several_passes_keep_their_graphs():
    """The value is the mean over the ranks, the derivative that of this rank's own passes."""
    # of (k w.1)^2, w = (1, 1): 4 k^2 each; its sum's derivative: 4 k^2 each
    for rank, found in enumerate(run_threads(2, accumulated)):
        own = [(1.0 + rank) ** 2, (2.0 + rank) ** 2]
        assert found[0].tolist() == pytest.approx([4 * (1 + 4 + 4 + 9) / 2] * 2)
        assert found[1].tolist() == pytest.approx([4 * sum(own)] * 2)


def _backward(loss: Tensor, _: list[nn.Parameter]) -> None:
    loss.backward(create_graph=True)


def _grad(loss: Tensor, params: list[nn.Parameter]) -> None:
    torch.autograd.grad(loss, params, create_graph=True)


def refused(world: World, how: str) -> list[str]:
    found = []
    for act in (_backward, _grad):
        model = wrap(how, make("sequential").double(), world)
        loss = model(rows(0, world.rank)).square().mean()
        found.append(refusal(partial(act, loss, list(model.parameters()))))
        model(rows(0, world.rank)).square().mean().backward()  # the next pass is as any other
    return found


@pytest.mark.parametrize("how", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_double_backward_of_sharded_parameters_is_refused(how: str):
    """Weights are given up after their use: one paragraph, and nothing is left behind."""
    for texts in run_threads(2, refused, how):
        assert all("create_graph=True" in text and "sw.DDP(module)" in text for text in texts)


def in_backward(world: World, how: str, before: bool) -> dict[str, Tensor]:
    model, optim = make("sequential").double(), None
    if how == "after":
        optim = torch.optim.Adam(model.parameters(), lr=0.05)
    elif before:
        apply_in_backward(torch.optim.Adam, model, lr=0.05)
    sw.DDP(model, world)
    if how == "within" and not before:
        apply_in_backward(torch.optim.Adam, model, lr=0.05)
    for step in range(6):
        loss = model(rows(step, world.rank)).square().mean()
        if step % 2:
            loss.backward()
        else:
            with sw.no_sync(model):
                loss.backward()
        if optim is not None and step % 2:
            optim.step()
            optim.zero_grad()
        assert step % 2 == 0 or all(p.grad is None for p in model.parameters())
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("before", [True, False])
def test_optimizers_in_backward_do_what_a_step_after_it_does(before: bool):
    """Made before or after the wrapping: same weights, no gradient left, no update in no_sync."""
    expected = run_threads(2, in_backward, "after", before)[0]
    for found in run_threads(2, in_backward, "within", before):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def sharded_in_backward(world: World, how: str) -> str:
    model = make("sequential").double()
    apply_in_backward(torch.optim.SGD, model, lr=0.1)
    return refusal(lambda: _used(model, world, how))


def _used(model: nn.Module, world: World, how: str) -> None:
    if how == "engine":
        sw.parallelize(model, "dp2 fp64", world, loss=squares)
    elif how == "Pipe":
        sw.Pipe(model, chunks=1, world=world)(rows(0, 0)).sum().backward()
    else:
        wrap(how, model, world)(rows(0, world.rank)).sum().backward()


@pytest.mark.parametrize("how", ["FULL_SHARD", "SHARD_GRAD_OP", "Pipe", "engine"])
def test_optimizers_in_backward_are_refused_elsewhere(how: str):
    """They would step on a part of a gradient: one paragraph, before any weight has changed."""
    for text in run_threads(2, sharded_in_backward, how):
        assert "applied in the backward pass" in text and "optim.step()" in text


def penalised(model: nn.Module, batch: Tensor) -> Tensor:
    loss = squares(model, batch)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * torch.stack([g.square().sum() for g in grads]).sum()


def of_engine(world: World, plan: str) -> dict[str, Tensor]:
    model = make("sequential").double()
    engine = sw.parallelize(model, plan, world, loss=penalised, optimizer=sw.SGD(lr=0.1))
    for step in range(3):
        engine.step(rows(step, world.rank))
    return full_parameters(engine.flats)


@pytest.mark.parametrize("plan", ["dp2 fp64", "dp2 zero1 fp64", "dp2 zero2 fp64"])
def test_a_loss_of_gradients_trains_in_the_engine(plan: str):
    """A penalty on each rank's own gradient, where parameters stay whole during the pass."""
    model = make("sequential").double()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(2):
            (penalised(model, rows(step, rank)) / 2).backward()
        optim.step()
        optim.zero_grad()
    for found in run_threads(2, of_engine, plan):
        for name, p in model.named_parameters():
            assert difference(found[name], p.detach()) <= 1e-10, name


def test_a_loss_of_gradients_is_refused_where_weights_are_given_up():
    """zero3 frees them after their use: one paragraph, in the first step."""
    with pytest.raises(RankError, match=r"create_graph=True.*the plan word ddp"):
        run_threads(2, of_engine, "dp2 zero3 fp64")
