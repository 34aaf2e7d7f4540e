"""Logits in columns of ranks, or in tiles, do what those of one process do."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm.move import part
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.core.layouts.uneven import Cut, even
from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.kernels.logits import Logits
from shardwise.techniques.tensor.sharded_logits import sharded_logits
from shardwise.techniques.tile.apply import Tile, into_tiles
from tests.pool import run_gloo, run_threads

V, F64 = 7, torch.float64
ROWS = torch.tensor([[0, 2, 1], [1, 1, 0]])
MASK = torch.tensor([[True, False, True], [False, False, True]])
Function = Callable[[Any], Any]


def sample(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (2, 3, V)), generator=draw, dtype=F64)


def on_rank(world: World, x: Tensor, cut: Cut | None = None) -> tuple[Tensor, Logits]:
    """This rank's columns of `x`, and the logits that they are of."""
    cut = cut or even(0, x.shape[-1], world.size)
    local = part(x, cut.on(x.dim() - 1), world.rank).requires_grad_()
    return local, sharded_logits(local * 1, world.everyone, cut)


def columns(world: World, x: Tensor, cut: Cut | None = None) -> Tensor:
    return part(x, (cut or even(0, x.shape[-1], world.size)).on(x.dim() - 1), world.rank)


def near(found: Any, wanted: Any, rtol: float = 1e-12, atol: float = 1e-15) -> None:
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, equal_nan=True)


def gathers(world: World) -> int:
    return sum(t.calls for key, t in world.ledger.lines.items() if key.kind == "all_gather")


# --- functions of logits --------------------------------------------------------------------------


def changed(change: Function) -> Function:
    def function(x: Any) -> Any:
        change(x)
        return x

    return function


ON_COLUMNS: dict[str, Function] = {
    "to device": lambda x: x.to("cpu", torch.float32),
    "type": lambda x: x.type(torch.float32),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "view by its own size": lambda x: x.view(-1, x.size(-1)),
    "view by one unknown": lambda x: x.view((2, -1, 1, V)),
    "reshape of what is not contiguous": lambda x: torch.reshape(x[:, :-1], (-1, x.shape[-1])),
    "flatten by names": lambda x: torch.flatten(x, start_dim=0, end_dim=-2),
    "transpose": lambda x: x.transpose(0, -2),
    "iteration": lambda x: [*x, *x.unbind()],
    "all but the last": lambda x: x[..., :-1, :],
    "the last": lambda x: x[:, -1],
    "new dims": lambda x: x[None, :, None],
    "an ellipsis at the end": lambda x: x[1, ...],
    "soft-capping": lambda x: torch.tanh(x / 30.0) * 30.0,
    "from the left": lambda x: 2.0 / (3.0 - 2 * (1 + -x)),
    "bounds": lambda x: x.clamp(-1, max=1),
    "a number as a tensor": lambda x: x * torch.tensor(3.0) + torch.ones(2, 1, 1),
    "padding cleared": lambda x: x.masked_fill(MASK.unsqueeze(-1), 0.0),
    "in place: scaled": changed(lambda x: x.mul_(3.0).sub_(1).div_(2)),
    "in place: in a reshape": changed(lambda x: x.view(-1, V)[2:4].tanh_()),
}
ON_THE_WHOLE: dict[str, Function] = {
    "softmax": lambda x: F.softmax(x, dim=-1, dtype=F64),
    "topk": lambda x: x.topk(2),
    "a bias": lambda x: x + torch.arange(V),
    "stack": lambda x: torch.stack([x, x[:, [2, 1, 0]]]),
    "a mask": lambda x: x[MASK],
    "rows by number, apart": lambda x: x[:, None][ROWS.clamp(max=1), :, ROWS],
    "a number of the last dim, then an ellipsis": lambda x: x[0, 0, 1, ...],
    "some columns": lambda x: x[:, :, 1:5],
    "columns by number": lambda x: x[0, :, torch.tensor([6, 0])],
    "a dim after the columns": lambda x: x[..., None],
    "flatten all": lambda x: x.flatten(),
    "view otherwise": lambda x: x.view(V, -1),
    "view as bytes": lambda x: x.detach().view(torch.int64),
    "transpose of columns": lambda x: x.mT,
    "split of columns": lambda x: x.split(3, -1),
    "unsqueeze": lambda x: x.unsqueeze(0).unsqueeze(-2),
    "probabilities": lambda x: F.cross_entropy(x.flatten(0, 1), torch.full((6, V), 1 / V)),
    "weighted": lambda x: F.cross_entropy(
        x.flatten(0, 1), ROWS.flatten(), weight=torch.arange(V).double()
    ),
    "classes in dim 1": lambda x: F.cross_entropy(x.transpose(1, 2), ROWS),
    "positions in the last dim": lambda x: F.cross_entropy(x, torch.arange(2 * V).view(2, V) % 3),
}
IN_PLACE: dict[str, Function] = {
    "a row": changed(lambda x: x.__setitem__((0, 1), 5.0)),
    "+=": changed(lambda x: x.__iadd__(torch.arange(V))),
    "columns masked": changed(lambda x: x.__setitem__((..., slice(5, None)), -9.0)),
    "a column of a row": changed(lambda x: x[0, 1].__setitem__(3, 7.0)),
    "masked by value": changed(lambda x: x.masked_fill_(x > 0, 0.5)),
    "copied": changed(lambda x: x.copy_(x.softmax(-1))),
    "one of its own": changed(lambda x: x.__setitem__(0, x[1])),
}


def same(world: World, function: Function, on_columns: bool | None) -> None:
    """`function` of logits on ranks, and the gradient, against that of all; None: in place."""
    x = sample().requires_grad_()
    local, logits = on_rank(world, x.detach())
    before = gathers(world)
    ours, theirs = function(logits), function(x * 1)
    gathered = world.size > 1 and on_columns is False
    assert on_columns is None or (gathers(world) > before) == gathered
    ours, theirs = ([*out] if isinstance(out, tuple | list) else [out] for out in (ours, theirs))
    total, expected = torch.zeros(()).double(), torch.zeros(()).double()
    for one, other in zip(ours, theirs, strict=True):
        assert isinstance(one, Logits) == (on_columns is not False)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        kept = isinstance(one, Logits)
        mine = one.local if isinstance(one, Logits) else one
        near(mine, columns(world, other) if kept else other, rtol=1e-13)
        if other.requires_grad:
            total = total + (mine * mine.cos()).sum()
            expected = expected + (other * other.cos()).sum()
    if expected.requires_grad:
        total.backward()
        expected.backward()
        assert x.grad is not None
        near(local.grad, columns(world, x.grad), atol=1e-14)


def every(world: World) -> None:
    for functions, where in ((ON_COLUMNS, True), (ON_THE_WHOLE, False), (IN_PLACE, None)):
        for function in functions.values():
            same(world, function, where)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("run", "ranks"), [(run_threads, 1), (run_threads, 3), (run_threads, 4), (run_gloo, 2)]
)
def test_functions_of_logits(run: Any, ranks: int):
    """On columns, without a gather, where these are apart; else of all columns (pytorch#190746)."""
    run(ranks, every)


def told(world: World) -> None:
    """What a program asks of a shape is that of all columns, and it prints as the whole."""
    local, logits = on_rank(world, sample())
    assert isinstance(logits, Tensor)
    assert logits.shape == logits.size() == (2, 3, V)
    assert logits.size(-1) == logits.size(dim=2) == logits.shape[2] == V
    assert logits.numel() == torch.numel(logits) == logits.nelement() == 6 * V
    assert (len(logits), logits.dim(), logits.dtype, logits.device.type) == (2, 3, F64, "cpu")
    assert logits.local.shape == local.shape
    assert gathers(world) == 0
    assert (repr(logits.detach()), logits.tolist()) == (repr(sample()), sample().tolist())
    before = gathers(world)
    torch.stack([logits, logits])
    assert gathers(world) - before == 1  # once for one function
    for wrong in (lambda: logits.view(5, V), lambda: logits.view(-1, -1, V), lambda: logits[9]):
        with pytest.raises((RuntimeError, IndexError)):
            wrong()
    foreach: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
    for into in (lambda: torch.add(logits, 1, out=logits), lambda: foreach([logits], 1.0)):
        with torch.no_grad(), pytest.raises(InputError, match="into sharded logits"):
            into()


def test_logits_are_a_tensor():
    """Shape, size, text and errors are the whole's; what nobody would see is refused."""
    run_threads(4, told)


def learned(world: World, x: Tensor) -> None:
    """A temperature that asks for a gradient meets all columns; hooks see this rank's."""
    expected, found = (torch.tensor(2.0, dtype=F64, requires_grad=True) for _ in range(2))
    (x * expected).cos().sum().backward()
    (on_rank(world, x)[1] * found).cos().sum().backward()
    near(found.grad, expected.grad)
    whole, targets, seen = x.flatten(0, 1).requires_grad_(), ROWS.flatten(), list[Any]()
    (grad,) = torch.autograd.grad(F.cross_entropy(whole, targets), whole)
    _, logits = on_rank(world, whole.detach())
    logits.register_hook(seen.append)
    logits.retain_grad()
    F.cross_entropy(logits, targets).backward()
    assert isinstance(logits.grad, Logits)
    for each in (seen[0], logits.grad.local):
        near(each, columns(world, grad))
    plain = logits + torch.zeros(V)  # Megatron-LM#7452: what was gathered is not off by log n
    assert type(plain) is Tensor
    near(F.cross_entropy(plain, targets), F.cross_entropy(whole, targets))


def test_numbers_that_learn_and_hooks():
    """They have the gradients of one process."""
    run_threads(3, learned, sample())


# --- tiles ----------------------------------------------------------------------------------------

TARGETS = torch.tensor([[0, 10, -100, 4], [7, 7, 3, 1], [9, 2, 6, -100]])


def layers(bias: bool = True) -> tuple[nn.Linear, nn.Linear, list[Tile]]:
    """The same layer plain and in tiles, and the tiles."""
    plain = nn.Linear(6, 11, bias=bias).double()
    tiled = copy.deepcopy(plain)
    return plain, tiled, into_tiles(tiled, even(0, 11, 4), logits=True)


IN_TILES: dict[str, Function] = {
    "flatten": lambda y: F.cross_entropy(y.flatten(0, 1), TARGETS.flatten()),
    "view": lambda y: F.cross_entropy(y.view(-1, 11), TARGETS.view(-1), reduction="sum"),
    "shifted": lambda y: F.cross_entropy(y[:, :-1].reshape(-1, 11), TARGETS[:, 1:].reshape(-1)),
    "last": lambda y: F.cross_entropy(y[..., 1:, :].flatten(0, -2), TARGETS[:, 1:].flatten()),
    "row": lambda y: nn.CrossEntropyLoss(ignore_index=7)(y[1].to(F64), TARGETS[1]),
    "none": lambda y: F.cross_entropy(y.flatten(0, 1), TARGETS.flatten(), reduction="none")[::2],
    "one position": lambda y: F.cross_entropy(y[0, 1], TARGETS[0, 1]),
    "positions first": lambda y: sw.cross_entropy(y, TARGETS, z_loss=0.1, label_smoothing=0.2),
    "each": lambda y: sw.cross_entropy(y.transpose(0, 1), TARGETS.T, reduction="none"),
    "rows": lambda y: F.cross_entropy([*y][2], TARGETS[2]) + F.cross_entropy(y[-3], TARGETS[0]),
}
ALL_LOGITS: dict[str, Function] = {
    "classes first": lambda y: F.cross_entropy(y.transpose(1, 2), TARGETS),
    "soft": lambda y: F.cross_entropy(y.flatten(0, 1), torch.full((12, 11), 1 / 11).double()),
    "flat": lambda y: y.flatten().sum() + y.view(-1).sum() + (y / 3).tanh().max(),
}


@pytest.mark.cases(26)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", [*IN_TILES, *ALL_LOGITS])
def test_losses_in_tiles(name: str, bias: bool, monkeypatch: pytest.MonkeyPatch):
    """Values and gradients; a cross-entropy makes no tensor with all columns."""
    plain, tiled, tiles = layers(bias)
    x = sample(3, 4, 6).requires_grad_()
    loss = (IN_TILES | ALL_LOGITS)[name]
    if name in IN_TILES:
        monkeypatch.setattr(Logits, "full", None)
    wanted, found = loss(plain(x)), loss(tiled(x))
    near(found, wanted, rtol=1e-10, atol=0.0)
    expected = torch.autograd.grad(wanted.sum(), [x, *plain.parameters()])
    owns: list[Any] = [tile.own for tile in tiles]
    params = [own[key] for key in ("weight", "bias")[: 1 + bias] for own in owns]
    into_x, *others = torch.autograd.grad(found.sum(), [x, *params])
    found = [into_x, torch.cat(others[:4]), *([torch.cat(others[4:])] if bias else [])]
    near(found, [*expected], rtol=1e-10, atol=1e-14)


def test_logits_in_tiles_can_be_written_to():
    """What is written to logits or to a view is in all views, also earlier ones, and in no copy."""
    losses: list[list[Tensor]] = []
    for layer in layers()[:2]:
        y = layer(sample(3, 4, 6))
        flat, copies = y.view(-1, 11), (y.float(), y.transpose(0, 1).contiguous().transpose(0, 1))
        y[..., 3] = -5.0
        y[1].view(-1, 11)[2:].mul_(0.5)
        every = (y.flatten(0, 1), flat, *(each.flatten(0, 1) for each in copies))
        losses.append([F.cross_entropy(one, TARGETS.flatten()) for one in every])
    torch.testing.assert_close(*losses)


def test_gradients_are_recorded_where_the_layer_was_called():
    """A metric under no_grad does not take the loss's gradient; a layer under no_grad has none."""
    plain, tiled, tiles = layers()
    losses = []
    for y in (plain(sample(3, 4, 6)), tiled(sample(3, 4, 6))):
        with torch.no_grad():
            assert (y.argmax(-1) == TARGETS).sum() >= 0
            assert not F.cross_entropy(y.flatten(0, 1), TARGETS.flatten()).requires_grad
        losses.append(F.cross_entropy(y.flatten(0, 1), TARGETS.flatten()))
    owns: list[Any] = [tile.own for tile in tiles]
    found = torch.autograd.grad(losses[1], [own["weight"] for own in owns])
    near(torch.cat(found), torch.autograd.grad(losses[0], plain.weight)[0], rtol=1e-10)
    with torch.no_grad():
        teacher = tiled(sample(3, 4, 6))
    assert not (teacher / 2).requires_grad
    assert not F.cross_entropy(teacher.flatten(0, 1), TARGETS.flatten()).requires_grad


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
    """A gradient that the tiles would not see, an input that was changed, a target of no tile."""
    tiled, x = layers()[1], sample(3, 4, 6)
    with pytest.raises(InputError, match=r"torch.autograd.Function.*logits.clone\(\)"):
        Custom.apply(tiled(x)).backward()
    Custom.apply(tiled(x).clone()).backward()
    with torch.no_grad():
        logits = tiled(x)
        x.zero_()
        with pytest.raises(InputError, match="changed in place before its logits"):
            logits.argmax(-1)


@pytest.mark.parametrize("wrong", [-1, 11])
def test_a_target_outside_the_vocabulary_is_an_error(wrong: int):
    """It is in no tile and on no rank, and would be a logit of 0; as torch says."""
    plain, tiled, _ = layers()

    def on_ranks(world: World) -> None:
        logits = on_rank(world, sample(3, 11))[1]
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            cross_entropy(logits, torch.tensor([0, wrong, -100]))

    run_threads(2, on_ranks)
    for logits in (plain(sample(2, 6)), tiled(sample(2, 6))):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            F.cross_entropy(logits, torch.tensor([3, wrong]))


def test_autocast_is_that_of_the_layer():
    """Logits have the types and the values that they have without tiles."""
    plain, tiled, tiles = layers()
    plain, x, found = plain.float(), sample(12, 6).float(), list[list[Tensor]]()
    for tile in tiles:
        tile.own = {key: p.float() for key, p in tile.own.items()}  # type: ignore[union-attr]
    for layer in (plain, tiled):
        outside = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            inside = layer(x)
            assert inside.dtype == torch.bfloat16
            losses = [F.cross_entropy(y, TARGETS.flatten()) for y in (inside, outside)]
        found.append([*losses, F.cross_entropy(inside, TARGETS.flatten())])
    torch.testing.assert_close(found[1], found[0])
