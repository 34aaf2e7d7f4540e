"""The dispatch of rows beside the experts that all tokens share."""

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
from shardwise.parallel.expert.gate import Gate
from shardwise.parallel.expert.global_batch import GlobalBatch
from shardwise.parallel.expert.layer import MoE, Place
from tests.pool import run_gloo, run_threads

F64 = torch.float64


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
    layer.place = Place(GlobalBatch((axis,)), axis, (0, 1))
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
