"""Logits of a tiled layer: the loss tile by tile, and everything else as a plain tensor."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.core.uneven import even
from shardwise.parallel.tile.layer import into_tiles
from shardwise.parallel.tile.logits import TiledLogits

TARGETS = torch.tensor([[0, 10, -100, 4], [7, 7, 3, 1], [9, 2, 6, -100]])


def layers(bias: bool = True) -> tuple[nn.Linear, nn.Linear, list[nn.Parameter]]:
    """The same layer plain and in tiles, and the parameters of the tiles."""
    plain = nn.Linear(6, 11, bias=bias).double()
    tiled = copy.deepcopy(plain)
    tiles = into_tiles(tiled, even(0, 11, 4), logits=True)
    return plain, tiled, [p for key in plain._parameters for t in tiles for p in _own(t, key)]


def _own(tile: nn.Module, key: str) -> list[nn.Parameter]:
    found: dict[str, nn.Parameter] = tile.own  # type: ignore[assignment]
    return [found[key]] if key in found else []


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda y: F.cross_entropy(y.flatten(0, 1), TARGETS.flatten()),
    "view": lambda y: F.cross_entropy(y.view(-1, 11), TARGETS.view(-1), reduction="sum"),
    "shifted": lambda y: F.cross_entropy(y[:, :-1].reshape(-1, 11), TARGETS[:, 1:].reshape(-1)),
    "last": lambda y: F.cross_entropy(y[..., 1:, :].flatten(0, -2), TARGETS[:, 1:].flatten()),
    "row": lambda y: nn.CrossEntropyLoss(ignore_index=7)(y[1].to(torch.float64), TARGETS[1]),
    "none": lambda y: F.cross_entropy(y.flatten(0, 1), TARGETS.flatten(), reduction="none")[::2],
}
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "smoothed": lambda y: F.cross_entropy(y.flatten(0, 1), TARGETS.flatten(), label_smoothing=0.1),
    "classes first": lambda y: F.cross_entropy(y.transpose(1, 2), TARGETS),
    "soft": lambda y: F.cross_entropy(y.flatten(0, 1), torch.full((12, 11), 1 / 11).double()),
    "capped": lambda y: (y / 3).tanh().square().mean(),
    "flat": lambda y: y.flatten().sum() + y.view(-1).sum() + y.max(),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", [*LOSSES, *WHOLE])
def test_values_and_gradients(name: str, bias: bool):
    """Of every loss, in tiles or of all logits: values, gradients of inputs and weights."""
    plain, tiled, params = layers(bias)
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    loss = (LOSSES | WHOLE)[name]
    wanted, found = loss(plain(x)), loss(tiled(x))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)
    expected = torch.autograd.grad(wanted.sum(), [x, *plain.parameters()])
    into_x, *others = torch.autograd.grad(found.sum(), [x, *params])
    torch.testing.assert_close(into_x, expected[0], rtol=1e-10, atol=1e-14)
    whole = [torch.cat(others[:4]), *([torch.cat(others[4:])] if bias else [])]
    for one, other in zip(whole, expected[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_full_logits_are_never_made(name: str, monkeypatch: pytest.MonkeyPatch):
    """A cross-entropy needs no tensor with all columns."""
    monkeypatch.setattr(TiledLogits, "full", None)
    _, tiled, _ = layers()
    logits = tiled(torch.randn(3, 4, 6, dtype=torch.float64))
    assert logits.shape == (3, 4, 11) and logits.dtype == torch.float64
    assert LOSSES[name](logits).isfinite().all()


def test_logits_can_be_written_to():
    """What is written to the logits is in what is computed from them later."""
    plain, tiled, _ = layers()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    wanted, found = plain(x).clone(), tiled(x)
    wanted[..., 3] = found[..., 3] = -5.0
    losses = [F.cross_entropy(y.flatten(0, 1), TARGETS.flatten()) for y in (wanted, found)]
    torch.testing.assert_close(losses[1], losses[0])


def test_a_cast_is_of_the_products():
    """Logits in bfloat16, the loss in fp32, as without tiles."""
    plain, tiled, _ = layers()
    plain, x = plain.bfloat16(), torch.randn(12, 6).bfloat16()
    for tile in tiled.tiles:  # type: ignore[union-attr]
        tile.own = {key: p.bfloat16() for key, p in tile.own.items()}
    wanted = F.cross_entropy(plain(x).float(), TARGETS.flatten())
    found = F.cross_entropy(tiled(x).float(), TARGETS.flatten())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted)
