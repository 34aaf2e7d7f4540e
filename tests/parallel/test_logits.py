"""Logits that stay cut compute what whole ones do, on the columns where that is enough."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.comm.move import part
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError, RankError
from shardwise.core.layouts.uneven import even
from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.kernels.logits import Logits
from shardwise.techniques.tensor.sharded_logits import sharded_logits
from tests.pool import run_gloo, run_threads

V = 7
ROWS = torch.tensor([[0, 2, 1], [1, 1, 0]])
MASK = torch.tensor([[True, False, True], [False, False, True]])
SEVEN = torch.arange(V)
Function = Callable[[Any], Any]


def sample() -> Tensor:
    """Logits [2, 3, V] in fp64."""
    seed = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, V, generator=seed, dtype=torch.float64)


def held(world: World, x: Tensor) -> tuple[Tensor, Logits]:
    """This rank's columns of `x`, and the logits that they are of."""
    cut = even(0, V, world.size)
    local = part(x, cut.on(x.dim() - 1), world.rank).requires_grad_()
    return local, sharded_logits(local * 1, world.everyone, cut)


def gathers(world: World) -> int:
    """How many gathers there were."""
    return sum(t.calls for key, t in world.ledger.lines.items() if key.kind == "all_gather")


def same(world: World, function: Function, on_columns: bool) -> None:
    """`function` of logits that are cut, and the gradient, against that of the whole."""
    x = sample().requires_grad_()
    local, logits = held(world, x.detach())
    before = gathers(world)
    ours, theirs = listed(function(logits)), listed(function(x * 1))
    total, expected = torch.zeros(()).double(), torch.zeros(()).double()
    for one, other in zip(ours, theirs, strict=True):
        assert isinstance(one, Logits) == on_columns
        assert one.shape == other.shape and one.dtype == other.dtype
        columns = part(other, even(0, V, world.size).on(other.dim() - 1), world.rank) \
            if on_columns else other  # fmt: skip
        mine = one.local if isinstance(one, Logits) else one
        torch.testing.assert_close(mine, columns, rtol=1e-13, atol=1e-15)
        if other.requires_grad:
            total = total + (mine * mine.cos()).sum()
            expected = expected + (other * other.cos()).sum()
    assert (gathers(world) == before) == on_columns
    if expected.requires_grad:
        total.backward()
        expected.backward()
        assert x.grad is not None
        columns = part(x.grad, even(2, V, world.size), world.rank)
        torch.testing.assert_close(local.grad, columns, rtol=1e-12, atol=1e-14)


def listed(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def changed(change: Callable[[Any], Any]) -> Function:
    """The logits after `change` was made to them."""

    def function(x: Any) -> Any:
        change(x)
        return x

    return function


ON_COLUMNS: dict[str, Function] = {
    "float": lambda x: x.float(),
    "to dtype": lambda x: x.to(torch.float32),
    "to the same": lambda x: x.to(torch.float64),
    "to device": lambda x: x.to("cpu", torch.float32),
    "type": lambda x: x.type(torch.float32),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "view": lambda x: x.view(-1, V),
    "view by its own size": lambda x: x.view(-1, x.size(-1)),
    "view as a tuple": lambda x: x.view((3, 2, V)),
    "view by one unknown": lambda x: x.view(2, -1, 1, V),
    "reshape": lambda x: torch.reshape(x, (6, V)),
    "reshape of what is not contiguous": lambda x: x[:, :-1].reshape(-1, x.shape[-1]),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten by names": lambda x: torch.flatten(x, start_dim=0, end_dim=-2),
    "transpose": lambda x: x.transpose(0, -2),
    "unbind": lambda x: x.unbind(),
    "iteration": list,
    "all but the last": lambda x: x[..., :-1, :],
    "the last": lambda x: x[:, -1],
    "a row": lambda x: x[1, 2],
    "every other": lambda x: x[:, ::2, :],
    "new dims": lambda x: x[None, :, None],
    "an ellipsis at the end": lambda x: x[1, ...],
    "all": lambda x: x[...],
    "soft-capping": lambda x: torch.tanh(x / 30.0) * 30.0,
    "from the left": lambda x: 2.0 / (3.0 - 2 * (1 + -x)),
    "bounds": lambda x: x.clamp(-1, max=1),
    "itself": lambda x: x * x,
    "a number as a tensor": lambda x: x * torch.tensor(3.0) + torch.ones(2, 1, 1),
    "padding cleared": lambda x: x.masked_fill(MASK.unsqueeze(-1), 0.0),
    "in place: scaled": changed(lambda x: x.mul_(3.0).sub_(1).div_(2)),
    "in place: in a view": changed(lambda x: x[0].neg_()),
    "in place: in a reshape": changed(lambda x: x.view(-1, V)[2:4].tanh_()),
}
ON_THE_WHOLE: dict[str, Function] = {
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmax": lambda x: F.softmax(x, dim=-1, dtype=torch.float64),
    "entropy": lambda x: torch.distributions.Categorical(logits=x).entropy(),
    "kl": lambda x: F.kl_div(x.log_softmax(-1), torch.full_like(x, 1 / V), reduction="sum"),
    "argmax": lambda x: x.argmax(-1),
    "topk": lambda x: x.topk(2),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "sum": lambda x: x.sum(),
    "mean of the rest": lambda x: x.mean((0, 1)),
    "a bias": lambda x: x + torch.arange(V),
    "logits": lambda x: x.exp() - x,
    "a comparison": lambda x: x > 0,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "stack": lambda x: torch.stack([x, x[:, [2, 1, 0]]]),
    "cat of a list": lambda x: torch.cat([x, torch.zeros(2, 1, V)], dim=1),
    "a product": lambda x: x @ torch.ones(V, 2, dtype=torch.float64),
    "gather": lambda x: x.gather(-1, ROWS.unsqueeze(-1)),
    "select": lambda x: x.select(1, 2),
    "narrow": lambda x: x.narrow(dim=1, start=1, length=2),
    "a mask": lambda x: x[MASK],
    "rows by number": lambda x: x[:, torch.tensor([2, 0])],
    "rows by number, apart": lambda x: x[:, None][ROWS.clamp(max=1), :, ROWS],
    "a number of the last dim, then an ellipsis": lambda x: x[0, 0, 1, ...],
    "a column": lambda x: x[..., 3],
    "some columns": lambda x: x[:, :, 1:5],
    "columns by number": lambda x: x[0, :, torch.tensor([6, 0])],
    "a mask of all": lambda x: x[torch.ones(2, 3, V, dtype=torch.bool)],
    "a dim after the columns": lambda x: x[..., None],
    "columns by list": lambda x: x[:, [0, 2]],
    "flatten all": lambda x: x.flatten(),
    "view otherwise": lambda x: x.view(V, -1),
    "view as bytes": lambda x: x.detach().view(torch.int64),
    "unsqueeze last": lambda x: x.unsqueeze(-1),
    "transpose of columns": lambda x: x.transpose(1, 2),
    "mT": lambda x: x.mT,
    "split of columns": lambda x: x.split(3, -1),
    "unflatten": lambda x: x.unflatten(1, (3, 1)),
    "unsqueeze": lambda x: x.unsqueeze(0).unsqueeze(-2),
    "squeeze": lambda x: x[:1].squeeze(0),
    "split": lambda x: x.split(2, dim=1),
    "chunk": lambda x: x.chunk(2),
    "probabilities": lambda x: F.cross_entropy(x.flatten(0, 1), torch.full((6, V), 1 / V)),
    "weighted": lambda x: F.cross_entropy(
        x.flatten(0, 1), ROWS.flatten(), weight=torch.arange(V).double()
    ),
    "classes in dim 1": lambda x: F.cross_entropy(x.transpose(1, 2), ROWS),
    "positions in the last dim": lambda x: F.cross_entropy(x, torch.arange(2 * V).view(2, V) % 3),
    "as many classes as words": lambda x: F.cross_entropy(x[:, SEVEN % 3], SEVEN.repeat(2, 1)),
}
IN_PLACE: dict[str, Function] = {
    "a row": changed(lambda x: x.__setitem__((0, 1), 5.0)),
    "a tensor added": changed(lambda x: x.add_(torch.arange(V))),
    "+=": changed(lambda x: x.__iadd__(torch.arange(V))),
    "columns masked": changed(lambda x: x.__setitem__((..., slice(5, None)), -9.0)),
    "a column of a row": changed(lambda x: x[0, 1].__setitem__(3, 7.0)),
    "masked by value": changed(lambda x: x.masked_fill_(x > 0, 0.5)),
    "relu": changed(lambda x: F.relu(x, inplace=True)),
    "copied": changed(lambda x: x.copy_(x.softmax(-1))),
    "one of its own": changed(lambda x: x.__setitem__(0, x[1])),
}


@pytest.mark.parametrize("name", ON_COLUMNS)
def test_what_leaves_columns_apart_is_done_on_the_columns(name):
    """Values, shapes, dtypes and gradients are the whole's, and nothing is gathered."""
    for ranks in (1, 2, 4):
        run_threads(ranks, same, ON_COLUMNS[name], True)


@pytest.mark.parametrize("name", ON_THE_WHOLE)
def test_everything_else_is_done_on_the_whole(name):
    """Right, plain and gathered: also where others use log_softmax (pytorch#190746)."""
    run_threads(3, same, ON_THE_WHOLE[name], False)


def test_logits_are_gathered_once_for_one_function():
    """However often they are among its arguments; others are gathered each."""

    def counted(world: World) -> tuple[int, int]:
        logits = held(world, sample())[1]
        torch.stack([logits, logits])
        once = gathers(world)
        torch.stack([logits, logits.detach()])
        return once, gathers(world) - once

    assert run_threads(2, counted) == [(1, 2)] * 2


def everything(world: World) -> None:
    for function in ON_COLUMNS.values():
        same(world, function, on_columns=True)
    for function in ON_THE_WHOLE.values():
        same(world, function, on_columns=False)


def test_processes_agree_on_what_they_gather():
    """The same functions, on the columns and on the whole, between processes."""
    run_gloo(2, everything)


@pytest.mark.parametrize("name", IN_PLACE)
def test_whatever_is_done_in_place_changes_the_logits(name):
    """Also what needs all columns: they are gathered, changed, and taken apart again."""

    def done(world: World) -> None:
        x = sample().requires_grad_()
        local, logits = held(world, x.detach())
        expected = IN_PLACE[name](x * 1)
        assert IN_PLACE[name](logits) is logits
        torch.testing.assert_close(logits.full(), expected, rtol=1e-13, atol=0.0)
        logits.full().cos().sum().backward()
        expected.cos().sum().backward()
        assert x.grad is not None
        columns = part(x.grad, even(2, V, world.size), world.rank)
        torch.testing.assert_close(local.grad, columns, rtol=1e-12, atol=1e-14)

    run_threads(1, done)
    run_threads(3, done)


def test_it_tells_the_shape_of_the_whole():
    """What a program asks of a tensor's shape is that of all columns; the rest is its own."""

    def asked(world: World) -> None:
        local, logits = held(world, sample())
        assert isinstance(logits, Tensor) and logits.requires_grad and not logits.is_leaf
        assert logits.shape == logits.size() == (2, 3, V) and len(logits) == 2
        assert logits.size(-1) == logits.size(dim=2) == logits.shape[2] == V
        assert logits.numel() == torch.numel(logits) == logits.nelement() == 6 * V
        assert logits.dim() == logits.ndim == 3
        assert logits.dtype == torch.float64 and logits.device.type == "cpu"
        assert logits.is_floating_point() and logits.element_size() == 8
        assert logits.local.shape == local.shape
        assert gathers(world) == 0

    run_threads(4, asked)


def test_it_prints_as_the_whole():
    """Every rank that prints it prints all of it."""

    def printed(world: World) -> tuple[str, Any]:
        _, logits = held(world, sample())
        return repr(logits.detach()), logits.tolist()

    expected = repr(sample()), sample().tolist()
    assert run_threads(3, printed) == [expected] * 3


def test_a_number_that_learns_has_its_whole_gradient():
    """A temperature that asks for a gradient meets all columns, not this rank's alone."""
    x, expected = sample(), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    (x * expected).cos().sum().backward()

    def learned(world: World) -> Tensor | None:
        temperature = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        _, logits = held(world, x)
        (logits * temperature).cos().sum().backward()
        with torch.no_grad():
            assert isinstance(logits * temperature, Logits)
        return temperature.grad

    for grad in run_threads(3, learned):
        torch.testing.assert_close(grad, expected.grad, rtol=1e-12, atol=0.0)


def test_gathered_logits_have_the_plain_loss():
    """Megatron-LM#7452: what was gathered is whole, and its loss is not off by log n."""
    x, targets = sample().flatten(0, 1), ROWS.flatten()
    expected = F.cross_entropy(x, targets)

    def lost(world: World) -> list[Tensor]:
        logits = held(world, x)[1]
        plain = logits + torch.zeros(V)
        assert type(plain) is Tensor and type(logits.full()) is Tensor
        return [F.cross_entropy(plain, targets), cross_entropy(logits.full(), targets)]

    for losses in run_threads(4, lost):
        for loss in losses:
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)


def test_hooks_of_logits_see_this_rank_s_columns():
    """`register_hook` and `retain_grad` have the gradient of the columns."""
    x = sample().flatten(0, 1).requires_grad_()
    expected = torch.autograd.grad(F.cross_entropy(x, ROWS.flatten()), x)[0]

    def hooked(world: World) -> None:
        _, logits = held(world, x.detach())
        seen: list[Any] = []
        logits.register_hook(seen.append)
        logits.retain_grad()
        F.cross_entropy(logits, ROWS.flatten()).backward()
        mine = part(expected, even(1, V, world.size), world.rank)
        assert isinstance(logits.grad, Logits)
        for grad in (seen[0], logits.grad.local):
            torch.testing.assert_close(grad, mine, rtol=1e-12, atol=1e-15)

    run_threads(3, hooked)


REFUSED: dict[str, Function] = {
    "out": lambda x: torch.add(x, 1, out=x),
    "lists in place": lambda x: torch._foreach_add_([x], 1.0),  # pyright: ignore[reportPrivateImportUsage]
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_to_logits_that_are_cut_is_refused(name):
    """Rather than done to a copy that nobody sees."""

    def done(world: World) -> None:
        with torch.no_grad(), pytest.raises(InputError, match="into sharded logits"):
            REFUSED[name](held(world, sample())[1])

    run_threads(2, done)


def test_errors_of_torch_are_torchs():
    """What is no shape of the whole is refused as for any tensor."""
    logits = held(alone(), sample())[1]
    for wrong in (lambda: logits.view(5, V), lambda: logits.view(-1, -1, V), lambda: logits[9]):
        with pytest.raises((RuntimeError, IndexError)):
            wrong()


def as_transformers_does(logits: Tensor, labels: Tensor) -> Tensor:
    """The steps of a causal language model's loss: cast, shift, flatten, sum, divide."""
    logits = torch.tanh(logits / 30.0) * 30.0
    logits = logits.float()
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    logits = logits.view(-1, V)
    return nn.functional.cross_entropy(logits, shifted.view(-1), reduction="sum") / 4


def test_the_loss_of_a_language_model_gathers_nothing():
    """From the head to the loss, as the library's models have it, with soft-capping."""
    expected = as_transformers_does(sample(), ROWS)

    def lost(world: World) -> Tensor:
        loss = as_transformers_does(held(world, sample())[1], ROWS)
        assert gathers(world) == 0
        return loss

    for loss in run_threads(4, lost):
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)


def test_an_error_on_one_rank_is_that_of_its_line():
    """A wrong number of columns names the rank, and what it should hold."""

    def wrong(world: World) -> None:
        cut = even(0, V, world.size)
        sharded_logits(torch.zeros(2, 3), world.everyone, cut)

    with pytest.raises(RankError, match=r"3 columns on rank 1 of axis world.*the 4 columns of 7"):
        run_threads(2, lambda w: wrong(w) if w.rank else None)
