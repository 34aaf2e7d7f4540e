"""Logits of a tiled layer: the loss tile by tile, and everything else as a plain tensor."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.core.errors import InputError
from shardwise.core.layouts.uneven import even
from shardwise.kernels.logits import Logits
from shardwise.techniques.tile.tiled_layer import into_tiles

WEIGHTS = torch.linspace(0.5, 2, 11).double()
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
    "smoothed": lambda y: F.cross_entropy(y.flatten(0, 1), TARGETS.flatten(), label_smoothing=0.1),
    "one position": lambda y: F.cross_entropy(y[0, 1], TARGETS[0, 1]),
    "positions first": lambda y: sw.cross_entropy(y, TARGETS, z_loss=0.1, label_smoothing=0.2),
    "each": lambda y: sw.cross_entropy(y.transpose(0, 1), TARGETS.T, reduction="none"),
    "rows": lambda y: F.cross_entropy([*y][2], TARGETS[2]) + F.cross_entropy(y[-3], TARGETS[0]),
}
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "weighted": lambda y: nn.CrossEntropyLoss(WEIGHTS)(y.flatten(0, 1), TARGETS.flatten()),
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
    monkeypatch.setattr(Logits, "full", None)
    _, tiled, _ = layers()
    logits = tiled(torch.randn(3, 4, 6, dtype=torch.float64))
    assert logits.shape == (3, 4, 11) and logits.dtype == torch.float64
    assert LOSSES[name](logits).isfinite().all()


def test_logits_can_be_written_to():
    """What is written to logits or to a view is in all views, also earlier ones, and in no copy."""
    losses: list[list[Tensor]] = []
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    for layer in layers()[:2]:
        y = layer(x)
        flat, copies = y.view(-1, 11), (y.float(), y.transpose(0, 1).contiguous().transpose(0, 1))
        y[..., 3] = -5.0
        y[1].view(-1, 11)[2:].mul_(0.5)
        every = (y.flatten(0, 1), flat, *(each.flatten(0, 1) for each in copies))
        losses.append([F.cross_entropy(one, TARGETS.flatten()) for one in every])
    for found, wanted in zip(*losses, strict=True):
        torch.testing.assert_close(found, wanted)


def counted(y: Tensor) -> Tensor:
    """The loss after the share of right answers was computed without a gradient."""
    with torch.no_grad():
        assert (y.argmax(-1) == TARGETS).sum() >= 0
        assert not F.cross_entropy(y.flatten(0, 1), TARGETS.flatten()).requires_grad
    return F.cross_entropy(y.flatten(0, 1), TARGETS.flatten())


def test_gradients_are_recorded_where_the_layer_was_called():
    """A metric under no_grad does not take the loss's gradient; a layer under no_grad has none."""
    plain, tiled, params = layers()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    assert tiled(x).requires_grad and tiled(x).view(-1, 11).requires_grad
    wanted, found = counted(plain(x)), counted(tiled(x))
    into = torch.autograd.grad(wanted, plain.weight)[0], torch.autograd.grad(found, params[:4])
    torch.testing.assert_close(torch.cat(into[1]), into[0])
    with torch.no_grad():
        teacher = tiled(x)
    assert not teacher.requires_grad and not (teacher / 2).requires_grad
    assert not F.cross_entropy(teacher.flatten(0, 1), TARGETS.flatten()).requires_grad


@pytest.mark.parametrize("wrong", [-1, 11])
def test_a_target_outside_the_vocabulary_is_an_error(wrong: int):
    """It is in no tile, and would be a logit of 0; torch says the same of all logits."""
    for layer in layers()[:2]:
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            F.cross_entropy(layer(torch.zeros(2, 6).double()), torch.tensor([3, wrong]))


class Custom(torch.autograd.Function):
    """A loss that torch does not show to tensor subclasses."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(ctx.saved_tensors[0].shape)


def test_what_would_be_silently_wrong_is_refused():
    """A gradient that the tiles would not see, and an input that is no longer what it was."""
    tiled, x = layers()[1], torch.randn(3, 4, 6, dtype=torch.float64)
    with pytest.raises(InputError, match=r"torch.autograd.Function.*logits.clone\(\)"):
        Custom.apply(tiled(x)).backward()
    Custom.apply(tiled(x).clone()).backward()
    with torch.no_grad():
        logits = tiled(x)
        x.zero_()
        with pytest.raises(InputError, match="changed in place before its logits"):
            logits.argmax(-1)


def test_autocast_is_that_of_the_layer():
    """Logits have the types and the values that they have without tiles."""
    plain, tiled, _ = layers()
    plain, x = plain.float(), torch.randn(12, 6)
    for tile in tiled.tiles:  # type: ignore[union-attr]
        tile.own = {key: p.float() for key, p in tile.own.items()}
    found: list[Tensor] = []
    for layer in (plain, tiled):
        outside = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            inside = layer(x)
            assert inside.dtype == torch.bfloat16
            found += [F.cross_entropy(y, TARGETS.flatten()) for y in (inside, outside)]
        found.append(F.cross_entropy(inside, TARGETS.flatten()))
    for one, other in zip(found[3:], found[:3], strict=True):
        torch.testing.assert_close(one, other)
        assert one.dtype == other.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_logits_are_summed_in_32_bits(dtype: torch.dtype):
    """Loss and gradients of a confident model are those of logits cast to fp64, rounded once."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 64, generator=generator).to(dtype)
    targets = torch.randint(512, (32,), generator=generator)
    x = (weight[targets] * 0.19).to(dtype).requires_grad_()  # log-sum-exp is about 12
    head = nn.Linear(64, 512, bias=False).to(dtype)
    head.weight.data.copy_(weight)
    wanted = F.cross_entropy(head(x).double(), targets)
    expected = torch.autograd.grad(wanted, [x, head.weight])
    tiles = into_tiles(head, even(0, 512, 4), logits=True)
    found = F.cross_entropy(head(x), targets)
    into_x, *into = torch.autograd.grad(found, [x, *(tile.own["weight"] for tile in tiles)])
    assert found.dtype == dtype and wanted < 0.05
    for one, other in zip((found, into_x, torch.cat(into)), (wanted, *expected), strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error <= 2 * torch.finfo(dtype).eps
