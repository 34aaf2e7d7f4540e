"""A routing that several ranks share is that of one process, and overlaps shared experts."""

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.comm import overlap
from shardwise.comm.overlap import begin_rows
from shardwise.comm.transport import Pending
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.core.mesh import Mesh
from shardwise.techniques.expert import hard
from shardwise.techniques.expert.gate import FIXED, GATES, Extra, Gate
from shardwise.techniques.expert.global_batch import GlobalBatch
from shardwise.techniques.expert.moe_layer import ExpertPlace, MoE
from tests.pool import run_gloo, run_threads

F64 = torch.float64
E = 4
#: Rows of each data rank: uneven, and a rank without any.
SHARES = {"uneven": [9, 5, 1, 3], "one empty": [7, 0, 6, 2]}
LOSSES = {"balance": 0.3, "importance": 0.2, "z": 0.1}


def inputs(rows: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(7)
    normal = torch.randn(3, rows, E, generator=draw, dtype=F64)
    uniform = torch.rand(rows, generator=draw, dtype=F64)
    target = torch.randint(E, (rows,), generator=draw)
    skew = torch.tensor([1.5, 0.5, 0.0, -0.5], dtype=F64)  # so that some choices are dropped
    return {
        "logits": normal[0] + skew,
        "spread": normal[1],
        "normal": normal[2],
        "uniform": uniform,
        "target": target,
    }


def routed(name: str, capacity: float | None, x: dict[str, Tensor], batch: GlobalBatch):
    """The routing, and the gradient of a loss in which each token and each loss has a part."""
    logits = x["logits"].clone().requires_grad_()
    random = {"noisy-topk": x["normal"], "gshard": x["uniform"]}.get(name)
    spread, target = x["spread"], x["target"] if name in HARD else None
    bias = torch.tensor([0.1, -0.2, 0.0, 0.3], dtype=F64)
    losses = {} if name in FIXED else LOSSES
    gate = Gate(name, E, GATES[name] or 2, capacity, losses=losses)
    found = gate.route(logits, batch, Extra(random, spread, bias, target))
    # every rank's loss is its part: the auxiliary losses are divided by the ranks in any way
    part = (batch.rank + 1) * 2 / (batch.ranks * (batch.ranks + 1))
    kept = torch.where(found.positions >= 0, found.weights, 0.0)
    loss = (kept * torch.arange(1, 1 + kept.shape[1])).sum()
    loss = loss + part * sum(LOSSES.get(n, 1.0) * value for n, value in found.losses.items())
    if loss.requires_grad:
        loss.backward()
    return found, torch.zeros_like(logits) if logits.grad is None else logits.grad


HARD = ("assigned", "hash", "cluster", "argmax")


def against_one(world: World, mesh: str, name: str, capacity: float | None, shares: list[int]):
    here = world.on(Mesh.parse(mesh))
    axes = tuple(here.axis(axis) for axis, _ in Mesh.parse(mesh).axes)
    batch = GlobalBatch(axes)
    assert (batch.ranks, batch.rank) == (world.size, world.rank)
    whole = inputs(sum(shares))
    mine = {key: value.split(shares)[world.rank] for key, value in whole.items()}
    found, gradient = routed(name, capacity, mine, batch)
    one, expected = routed(name, capacity, whole, GlobalBatch())
    same = [
        torch.equal(getattr(found, key), getattr(one, key).split(shares)[world.rank])
        for key in ("experts", "positions")
    ]
    close = torch.allclose(gradient, expected.split(shares)[world.rank], rtol=1e-10, atol=1e-14)
    losses = all(abs(found.losses[n] - one.losses[n]) <= 1e-12 for n in one.losses)
    counted = found.dropped == one.dropped and torch.equal(found.wanted, one.wanted)
    shared = torch.equal(found.loads.sum(0), one.loads[0])
    own = (found.positions >= 0).int()
    mine_only = torch.zeros(E, dtype=torch.int64)
    mine_only.index_add_(0, found.experts.flatten(), own.flatten().long())
    return [*same, close, losses, counted, shared, torch.equal(found.loads[world.rank], mine_only)]


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("name", GATES)
def test_threads(name: str, capacity: float | None, shares: str):
    """Experts, places, dropped choices, losses and gradients are those of one process."""
    found = run_threads(4, against_one, "dp4", name, capacity, SHARES[shares])
    assert found == [[True] * 7] * 4


@pytest.mark.parametrize("mesh", ["dp4", "dp_replicate2 dp_shard2"])
def test_gloo(mesh: str):
    """So they are on four processes, on one data axis and on two."""
    for name in ("gshard", "expert-choice"):
        assert run_gloo(4, against_one, mesh, name, 1.0, SHARES["one empty"]) == [[True] * 7] * 4


def clustered(world: World, shares: list[int]):
    batch = GlobalBatch((world.on(Mesh.parse(f"dp{world.size}")).axis("dp"),))
    features = inputs(sum(shares))["logits"]
    centroids, mine = hard.balanced_clusters(features.split(shares)[world.rank], 3, batch)
    expected, clusters = hard.balanced_clusters(features, 3, GlobalBatch())
    return torch.equal(centroids, expected) and torch.equal(
        mine, clusters.split(shares)[world.rank]
    )


def test_clusters():
    """Balanced clusters of features that several ranks share are those of one process."""
    assert run_threads(4, clustered, SHARES["one empty"]) == [True] * 4


def assigned_wrongly(world: World, name: str, wrong: Tensor, said: str, instead: str) -> None:
    """Only rank 1 is given experts that do not exist; rank 0 has its own choice, if it may."""
    layer = MoE(8, 8, Gate(name, E))
    batch = GlobalBatch((world.on(Mesh.parse("dp2")).axis("dp"),))
    layer.place = replace(layer.place, batch=batch, name="blocks.3.moe")
    chosen = torch.tensor([0, 3, 1]) if name == "assigned" else None
    target = wrong if world.rank else chosen
    with pytest.raises(
        InputError, match=f"blocks.3.moe, .* {said} on data rank 1. Allowed.*instead: {instead}"
    ):
        layer(torch.randn(3, 8), target)


@pytest.mark.parametrize("name", ["assigned", "argmax"])
def test_experts_of_one_rank_that_do_not_exist(name: str):
    """An assignment that one rank cannot use is an error on all, with the layer and the rank."""
    wrong: list[tuple[list[float], str, str]] = [
        ([4, 0, -1], "-1 to 4", r"Gate\(..., experts=5\)"),
        ([0, -2, 1], "-2 to 1", "ids of experts from 0 up"),
        ([0.0, 1.0, 2.0], r"0 to 2 \(floating point\)", r"target.long\(\)"),
        ([0.0, math.nan, 2.0], r"nan to nan \(floating point\)", r"target.long\(\)"),
    ]
    for target, said, instead in wrong:
        run_gloo(2, assigned_wrongly, name, torch.tensor(target), said, instead)


class Noted(nn.Module):
    """Calls `inner`, and writes down when its forward and its backward pass run."""

    def __init__(self, name: str, events: list[str], inner: nn.Module) -> None:
        super().__init__()
        self.name, self.events, self.inner = name, events, inner

    def forward(self, *args: Any) -> Tensor:
        self.events.append(self.name)
        made = self.inner(*args)
        made.register_hook(lambda _: self.events.append(f"{self.name} backward"))
        return made


def whole() -> MoE:
    torch.manual_seed(0)
    gate = Gate("topk", 4, 2, losses={"balance": 0.1})
    return MoE(6, 5, gate, nn.Linear(6, 6)).double()


def features() -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(7, 6, generator=draw, dtype=F64).requires_grad_()


def trained(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the gradient of the input, of a loss in which each element has a part."""
    y, _ = layer(x)
    slope = torch.linspace(-1, 1, x.shape[1], dtype=F64)
    (gradient,) = torch.autograd.grad((y * slope).sum(), x)
    return y.detach(), gradient


def shared_by_two(world: World) -> tuple[list[str], Tensor, Tensor]:
    """What happens on a rank, and the output and the gradient of its rows."""
    axis, events, layer = world.on(Mesh((("dp", 2),))).axis("dp"), [], whole()
    for name, p in layer.experts.named_parameters():
        setattr(layer.experts, name, nn.Parameter(p.detach().chunk(2)[world.rank].clone()))
    layer.place = ExpertPlace(GlobalBatch((axis,)), axis, (0, 1))
    setattr(layer, "experts", Noted("experts", events, layer.experts))  # noqa: B010
    layer.shared = Noted("shared", events, layer.shared or nn.Identity())
    begin = overlap.begin_all_to_all

    def noted(x: Tensor, on: Any, *counts: Any) -> Pending[Tensor]:
        pending = begin(x, on, *counts)
        if on is not axis:  # the other rank's, if ranks are threads
            return pending
        events.append("begin")
        return Pending([lambda: events.append("wait"), pending.wait])

    x = features().detach().tensor_split(2)[world.rank].requires_grad_()
    with patch.object(overlap, "begin_all_to_all", noted):
        return events, *trained(layer, x)


def test_shared_experts_run_while_rows_are_under_way():
    """Forward and backward, what all tokens share is computed between begin and wait; as alone."""
    found = run_gloo(2, shared_by_two)
    forward = ["begin", "shared", "wait", "experts", "begin", "wait"]
    backward = ["begin", "wait", "experts backward", "begin", "shared backward", "wait"]
    for events, _, _ in found:
        assert events == [*forward, *backward]
    expected = trained(whole(), features())
    for of, value in enumerate(expected, start=1):
        assert torch.cat([each[of] for each in found]).allclose(value, rtol=1e-12, atol=1e-14)


def exchanged(world: World) -> tuple[Tensor, Tensor]:
    """Uneven rows, begun and waited for, and the gradient that comes back."""
    axis = world.on(Mesh((("dp", 2),))).axis("dp")
    counts = [[1, 2], [0, 3]]  # rows from, to
    sent, received = counts[axis.rank], [counts[r][axis.rank] for r in range(2)]
    x = (torch.arange(3.0) + 10 * axis.rank).view(3, 1).requires_grad_()
    wait = begin_rows(x, axis, received, sent)
    y = wait()
    y.backward(y.detach() * 2)
    assert x.grad is not None
    with torch.no_grad():
        assert torch.equal(begin_rows(x, axis, received, sent)(), y)
    with pytest.raises(InputError, match="all_to_all of 3 rows"):
        begin_rows(x, axis, received, [3, 3])
    return y.detach(), x.grad


def test_uneven_rows():
    """Rows arrive in the order of ranks, their gradients where the rows are from."""
    (first, back), (second, other) = run_threads(2, exchanged)
    assert first.flatten().tolist() == [0.0]
    assert second.flatten().tolist() == [1.0, 2.0, 10.0, 11.0, 12.0]
    assert back.flatten().tolist() == [0.0, 2.0, 4.0]
    assert other.flatten().tolist() == [20.0, 22.0, 24.0]
