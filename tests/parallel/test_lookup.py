"""Gradients of embeddings that are added to the rows looked up: the same numbers, by either way."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.kernels.fused_linear import LEAST
from shardwise.parallel.data.flat_gradient import FlatGradient
from tests.engine.cases import difference, settled
from tests.engine.tensors import mine
from tests.parallel.test_linear import assert_gradients, noted, there
from tests.pool import run_threads

ROWS, WIDTH = 512, 128  # just enough elements
assert ROWS * WIDTH == LEAST


class Net(nn.Module):
    """A large table, one with a row that is left alone, and a small one; `way` is how they are
    used.
    """

    def __init__(self, way: Callable[["Net", Tensor], Tensor], tied: bool = False) -> None:
        super().__init__()
        self.large = nn.Embedding(ROWS, WIDTH)
        self.padded = nn.Embedding(ROWS, WIDTH, padding_idx=3)
        self.small = nn.Embedding(7, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS if tied else 5, bias=False)
        if tied:
            self.head.weight = self.large.weight
        self.way = way

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.way(self, ids)))


def once(net: Net, ids: Tensor) -> Tensor:
    return net.large(ids) + net.padded(ids % 5) + net.small(ids % 7)


def in_place(net: Net, ids: Tensor) -> Tensor:
    return net.large(ids).tanh_() + net.padded(ids % 5).sigmoid_() + net.small(ids % 7)


def repeated(net: Net, ids: Tensor) -> Tensor:
    return once(net, ids) + net.large(ids.flip(0)) * net.large(ids.flip(1))


def read_besides(net: Net, ids: Tensor) -> Tensor:
    """One table by its layer, and as it is."""
    return once(net, ids) + net.large.weight[:1].sin()


def recomputed(net: Net, ids: Tensor, reentrant: bool) -> Tensor:
    first = net.small(ids % 7)
    looked_up = partial(_two, net, ids)
    return checkpoint(looked_up, first, use_reentrant=reentrant)


def _two(net: Net, ids: Tensor, x: Tensor) -> Tensor:
    return x * net.large(ids) + net.padded(ids % 5)


def unused(net: Net, ids: Tensor) -> Tensor:
    """What one layer gives is dropped."""
    net.large(ids)
    return net.padded(ids % 5) + net.small(ids % 7)


WAYS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "once": once,
    "in place": in_place,
    "repeated": repeated,
    "read besides": read_besides,
    "recomputed": partial(recomputed, reentrant=False),
    "recomputed, reentrant": partial(recomputed, reentrant=True),
    "unused": unused,
}


def ids_of(step: int, rank: int) -> Tensor:
    own = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 40, (2, 30), generator=own)  # several times the same


def made(way: Callable[[Net, Tensor], Tensor], tied: bool = False) -> Net:
    """The net with its weights, which follow from their names."""
    net = Net(way, tied).double()
    settled(net)
    return net


def wrapped(world: World, way: str, tied: bool) -> dict[str, Tensor | None]:
    """The gradients of two passes, added up, each rank with rows of its own."""
    model = sw.DDP(made(WAYS[way], tied), world)
    for step in range(2):
        model(ids_of(step, world.rank)).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


#: A weight that is used inside and outside of reentrant checkpointing is refused (data.py).
USES = [(way, tied) for way in WAYS for tied in (False, True) if not (tied and "reent" in way)]


@pytest.mark.parametrize(("way", "tied"), USES)
def test_gradients_are_those_of_autograd(way: str, tied: bool):
    """However often and from wherever a table is used; what has no gradient has none."""
    plain = made(WAYS[way], tied)
    for step in range(2):
        for rank in range(2):
            (plain(ids_of(step, rank)).square().sum() / 2).backward()
    for found in run_threads(2, wrapped, way, tied):
        assert_gradients(found, plain)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables whose gradients have been added to directly, in order."""
    return noted(monkeypatch, "add_rows")


def test_large_tables_are_added_to_directly(written: list[str]):
    """The small one by autograd."""
    wrapped(alone(), "once", tied=False)
    assert sorted(written) == ["large.weight", "large.weight", "padded.weight", "padded.weight"]


@pytest.mark.parametrize("hook", ["tensor", "accumulated", "layer"])
def test_what_hooks_see_and_change_is_autograds(written: list[str], hook: str):
    """A gradient that somebody looks at, and what a hook before ours makes of a layer's result."""
    plain, net, seen = made(once), made(once), list[Tensor]()
    if hook == "tensor":
        net.large.weight.register_hook(seen.append)
    elif hook == "accumulated":
        net.large.weight.register_post_accumulate_grad_hook(lambda p: seen.append(there(p)))
    model = sw.DDP(net, alone())
    for each in (plain, net) if hook == "layer" else ():
        each.large.register_forward_hook(lambda _, __, y: y * y.mean(), prepend=True)
    model(ids_of(0, 0)).square().sum().backward()
    plain(ids_of(0, 0)).square().sum().backward()
    assert written == ["padded.weight"]
    assert difference(there(net.large.weight), there(plain.large.weight)) <= 1e-12
    assert not seen or difference(seen[0], there(plain.large.weight)) <= 1e-12
    assert bool(seen) == (hook != "layer")


def test_gradients_that_are_asked_for_are_given(written: list[str]):
    """torch.autograd.grad returns them and leaves no gradient behind; of others none is made."""
    net = made(once)
    model = sw.DDP(net, alone())
    names, params = zip(*net.named_parameters(), strict=True)
    asked = torch.autograd.grad(model(ids_of(0, 0)).square().sum(), params)
    assert written == []
    assert all(p.grad is None for p in params)
    model(ids_of(0, 0)).square().sum().backward(inputs=[net.small.weight])
    assert written == []
    assert net.large.weight.grad is None
    model.zero_grad()
    model(ids_of(0, 0)).square().sum().backward()
    for name, p, grad in zip(names, params, asked, strict=True):
        assert difference(grad, there(p)) <= 1e-12, name


def penalty(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a penalty on the gradients of the tables (arXiv 1704.00028)."""
    tables = [p for name, p in model.named_parameters() if "head" not in name]
    slopes = torch.autograd.grad(model(ids_of(0, 0)).square().sum(), tables, create_graph=True)
    torch.stack([slope.square().sum() for slope in slopes]).sum().backward()
    return {name: there(p) for name, p in model.named_parameters() if p.grad is not None}


def test_a_gradient_can_be_differentiated():
    """A penalty on gradients trains a wrapped module as it trains a plain one."""
    expected = penalty(made(once))
    found = penalty(sw.DDP(made(once), alone()))
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert difference(found[name], grad) <= 1e-12, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sixteen_bits_are_summed_by_autograd(written: list[str], dtype: torch.dtype):
    """One addition after the other would round each time."""
    model = sw.DDP(made(once).to(dtype), alone())
    model(ids_of(0, 0)).float().square().sum().backward()
    assert len(written) == (2 if dtype == torch.float32 else 0)


def test_tables_with_options_of_their_own_are_left_to_torch(written: list[str]):
    """Renormalised rows, gradients by frequency."""
    for norm, by_frequency in ((1.0, False), (None, True)):
        plain, table = (
            nn.Embedding(ROWS, WIDTH, max_norm=norm, scale_grad_by_freq=by_frequency).double()
            for _ in range(2)
        )
        table.load_state_dict(plain.state_dict())
        for each in (plain, sw.DDP(table, alone())):
            each(ids_of(0, 0)).square().sum().backward()
        assert difference(there(table.weight), there(plain.weight)) <= 1e-12
    assert written == []


class Reader(nn.Module):
    """Reads tokens to the next one's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 2 * WIDTH)
        self.mix = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))))


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 11)


def trained(world: World, plan: str) -> tuple[list[float], int]:
    """The losses of three steps, and how many lookups of this rank's wrote directly."""
    optimizer, table = sw.AdamW(lr=0.01), {"embed": "vocabulary"} if "tp" in plan else None
    model = settled(Reader())
    engine = sw.parallelize(model, plan, world, optimizer=optimizer, loss=loss, table=table)
    count = [0]
    for flat in engine.flats:
        vars(flat.grads)["add_rows"] = partial(counted, flat.grads, count)
    rows = [ids_of(step, 0).view(4, 15) for step in range(3)]
    losses = [engine.step(mine(engine, ids)).loss for ids in rows]
    return losses, count[0]


def counted(grads: FlatGradient, count: list[int], *args: Any) -> None:
    count[0] += 1
    FlatGradient.add_rows(grads, *args)


@pytest.mark.parametrize(
    ("plan", "written"),
    [
        ("dp2 fp64", [3, 3]),
        ("dp2 zero3 accumulate:2 fp64", [6, 6]),
        ("tp2 fp64", [3, 3]),
        ("pp2 zb-h1:2 fp64", [6, 0]),
        ("dp2 bf16", [0, 0]),
    ],
)
def test_steps_add_rows_directly(plan: str, written: list[int]):
    """Of each microbatch, on the ranks that hold the table; the losses are one process's."""
    runs = run_threads(2, trained, plan)
    expected = run_threads(1, trained, "fp64")[0][0]
    for losses, _ in runs:
        assert losses == pytest.approx(expected, rel=3e-2 if "bf16" in plan else 1e-12)
    assert [count for _, count in runs] == written


def negative(net: Net) -> None:
    net.large.padding_idx = -1


def between(net: Net) -> None:
    net.large.weight.register_hook(lambda grad: 2 * grad)


def nothing(_: Net) -> None:
    """Leave the net as it is."""


@pytest.mark.parametrize(
    ("after", "then"),
    [(negative, nothing), (nothing, between)],
    ids=["negative padding", "a hook between the passes"],
)
def test_what_is_changed_later_is_heard(after: Callable[[Net], None], then: Callable[[Net], None]):
    """After wrapping, or between forward and backward."""
    plain, net, found = made(once), made(once), list[Tensor]()
    sw.DDP(net, alone())
    for each in (plain, net):
        after(each)
        y = each(ids_of(0, 0)).square().sum()
        then(each)
        y.backward()
        found.append(there(next(each.large.parameters())))
    assert difference(*found) <= 1e-12


def test_a_table_that_was_frozen_is_left_alone(written: list[str]):
    """One that is trained later, and called by itself, gets its gradient by autograd."""
    net = made(once)
    net.large.weight.requires_grad_(False)
    sw.DDP(net, alone())
    net.large.weight.requires_grad_(True)
    net.large(ids_of(0, 0)).sum().backward()
    assert net.large.weight.grad is not None
    assert written == []
