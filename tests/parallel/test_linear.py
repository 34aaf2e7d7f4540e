"""Large linear layers whose weight gradients are added where they are kept: the same gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.techniques.data.apply import drivers
from shardwise.techniques.data.flat.flat_gradient import FlatGradient
from shardwise.techniques.data.flat.weight_gradient import LEAST, take_over
from tests.engine.cases import Case, build, difference, regression, rows_task, settled
from tests.engine.tensors import mine
from tests.pool import run_threads

WIDE = 256  # a square weight has just enough elements
assert LEAST == WIDE * WIDE


class Net(nn.Module):
    """Two wide layers, the second with a bias, and a small one; `way` is how they are used."""

    def __init__(self, way: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(WIDE, WIDE, bias=False)
        self.b = nn.Linear(WIDE, WIDE)
        self.c = nn.Linear(WIDE, 3)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.way(self, x)) / WIDE


def once(net: Net, x: Tensor) -> Tensor:
    return torch.tanh(net.b(torch.tanh(net.a(x))))


def in_place(net: Net, x: Tensor) -> Tensor:
    return net.b(net.a(x).tanh_()).tanh_()


def repeated(net: Net, x: Tensor) -> Tensor:
    return torch.tanh(net.b(once(net, once(net, x).tanh())))


def read_twice(net: Net, x: Tensor) -> Tensor:
    """One weight by its layer, and besides."""
    return once(net, x) + torch.tanh(x @ net.b.weight)


def recomputed(net: Net, x: Tensor, reentrant: bool) -> Tensor:
    first = torch.tanh(net.a(x))
    return checkpoint(lambda y: torch.tanh(net.b(y)), first, use_reentrant=reentrant)


def unused(net: Net, x: Tensor) -> Tensor:
    """What one layer makes is dropped."""
    net.b(x)
    return torch.tanh(net.a(x))


WAYS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "once": once,
    "in place": in_place,
    "repeated": repeated,
    "read twice": read_twice,
    "recomputed": partial(recomputed, reentrant=False),
    "recomputed, reentrant": partial(recomputed, reentrant=True),
    "unused": unused,
}


def rows(step: int, rank: int) -> Tensor:
    own = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 3, WIDE, generator=own, dtype=torch.float64)


def made(way: Callable[[Net, Tensor], Tensor]) -> Net:
    """The net with its weights, which follow from their names."""
    net = Net(way).double()
    settled(net)
    return net


def directly(net: Net, world: World) -> Net:
    """The net wrapped, with the large gradients written where they are kept."""
    sw.DDP(net, world)
    [data] = drivers(net)
    sizes = {p: p.numel() for p in net.parameters()}
    take_over(net, data, sizes)
    return net


def wrapped(world: World, way: str) -> dict[str, Tensor | None]:
    """The gradients of two passes, added up, each rank with rows of its own."""
    model = directly(made(WAYS[way]), world)
    for step in range(2):
        model(rows(step, world.rank)).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_autograd(way: str):
    """However often and from wherever a weight is used; what has no gradient has none."""
    plain = made(WAYS[way])
    for step in range(2):
        for rank in range(2):
            (plain(rows(step, rank)).square().sum() / 2).backward()
    for found in run_threads(2, wrapped, way):
        assert_gradients(found, plain)


def assert_gradients(found: dict[str, Tensor | None], plain: nn.Module) -> None:
    """They are those of the plain module, and none where it has none."""
    for name, p in plain.named_parameters():
        grad = found[name]
        assert (grad is None) == (p.grad is None), name
        if grad is not None and p.grad is not None:
            assert difference(grad, p.grad) <= 1e-12, name


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The weights whose gradients have been written directly, in order."""
    return noted(monkeypatch, "add_product")


def noted(monkeypatch: pytest.MonkeyPatch, method: str) -> list[str]:
    """The parameters for which this method of FlatGradient is called, as they come."""
    names: list[str] = []
    plain = getattr(FlatGradient, method)

    def call(self: FlatGradient, index: int, *args: Any) -> None:
        names.append(self.names[index])
        plain(self, index, *args)

    monkeypatch.setattr(FlatGradient, method, call)
    return names


def test_large_weights_are_written_directly(written: list[str]):
    """From the last to the first, the small one by autograd."""
    wrapped(alone(), "once")
    assert written == ["b.weight", "a.weight"] * 2


def there(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad.clone()


@pytest.mark.parametrize("hook", ["tensor", "accumulated"])
def test_a_hook_on_a_weight_sees_its_gradient(written: list[str], hook: str):
    """A gradient that somebody looks at goes autograd's way."""
    net, seen = made(once), list[Tensor]()
    if hook == "tensor":
        net.a.weight.register_hook(seen.append)
    else:
        net.a.weight.register_post_accumulate_grad_hook(lambda p: seen.append(there(p)))
    model = directly(net, alone())
    model(rows(0, 0)).square().sum().backward()
    assert written == ["b.weight"]
    assert torch.equal(seen[0], there(net.a.weight))


@pytest.mark.parametrize("before", [False, True])
def test_hooks_on_a_layer_are_heard(before: bool):
    """What they make of its input, and of what it gives, has its part of the graph."""
    plain, net = made(once), made(once)
    model = directly(net, alone())
    for each in (plain, net):
        if before:
            each.a.register_forward_pre_hook(lambda _, args: (args[0] * args[0].mean(),))
        else:
            each.a.register_forward_hook(lambda _, args, y: y * args[0].mean(), prepend=True)
    inputs = rows(0, 0).requires_grad_(), rows(0, 0).requires_grad_()
    for each, x in zip((plain, model), inputs, strict=True):
        each(x).square().sum().backward()
    assert difference(there(inputs[1]), there(inputs[0])) <= 1e-12
    assert difference(there(net.a.weight), there(plain.a.weight)) <= 1e-12


def test_gradients_that_are_asked_for_are_given(written: list[str]):
    """torch.autograd.grad returns them and leaves no gradient behind."""
    model = directly(made(once), alone())
    names, params = zip(*model.named_parameters(), strict=True)
    asked = torch.autograd.grad(model(rows(0, 0)).square().sum(), params)
    assert written == []
    assert all(p.grad is None for p in params)
    model(rows(0, 0)).square().sum().backward()
    for name, p, grad in zip(names, params, asked, strict=True):
        assert difference(grad, there(p)) <= 1e-12, name


def penalty(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a penalty on the gradient of the input (arXiv 1704.00028)."""
    x = rows(0, 0).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    return {name: there(p) for name, p in model.named_parameters() if p.grad is not None}


def test_a_gradient_can_be_differentiated():
    """A penalty on gradients trains a wrapped module as it trains a plain one."""
    expected = penalty(made(once))
    found = penalty(directly(made(once), alone()))
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert difference(found[name], grad) <= 1e-12, name


def test_under_autocast_gradients_are_autograds(written: list[str]):
    """The layer computes in another dtype than its weight has."""
    model = directly(made(once).float(), alone())
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(rows(0, 0).float()).square().sum()
    loss.backward()
    assert written == []
    assert all(there(p).dtype == torch.float32 for p in model.parameters())


def test_a_layer_that_raises_leaves_nothing_behind():
    """The next pass is as ever."""
    net = made(once)
    weight, model = net.a.weight, directly(net, alone())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, WIDE + 1, dtype=torch.float64))
    assert net.a.weight is weight
    model(rows(0, 0)).square().sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize(
    ("plan", "directly"),
    [("dp2", 0), ("dp2 zero2 accumulate:2", 4), ("pp2 1f1b:2", 2), ("pp2 zb-h1:2", 2)],
)
def test_steps_of_several_microbatches_write_directly(plan: str, directly: int):
    """Two large weights on a rank, one under a pipeline, whole or in W."""
    for losses, count in run_threads(2, trained, plan):
        assert losses == pytest.approx(run_threads(1, trained, "ddp")[0][0], rel=1e-12)
        assert count == directly


def trained(world: World, plan: str) -> tuple[list[float], int]:
    """The losses of two steps, and how many gradients the second wrote directly."""
    engine = build(world, rows_task(in_a_row, batch), Case(f"{plan} fp64"))
    losses, count = [], [0]
    for flat in engine.flats:
        vars(flat.grads)["add_product"] = partial(counted, flat.grads, count)
    for step in range(2):
        count[0] = 0
        losses.append(engine.step(mine(engine, batch(step))).loss)
    return losses, count[0]


def in_a_row() -> nn.Module:
    first, second = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
    return settled(nn.Sequential(first, nn.Tanh(), second, nn.Linear(WIDE, 3)))


def counted(grads: FlatGradient, count: list[int], *args: Any) -> None:
    count[0] += 1
    FlatGradient.add_product(grads, *args)


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.cat([rows(step, rank).flatten(0, 1) for rank in range(2)]).repeat(2, 1)[:8]
    return x, x[:, :3].sin()


@pytest.mark.parametrize("bad", [(2, WIDE + 1), ()])
def test_inputs_that_do_not_fit_are_told_as_torch_tells(bad: tuple[int, ...]):
    """With our node as without."""
    x, texts = torch.ones(bad), []
    net = directly(made(once).float(), alone())
    for layer in (made(once).float().a, net.a):
        with pytest.raises((RuntimeError, IndexError)) as told:
            layer(x)
        texts.append(str(told.value))
    assert texts[0] == texts[1]


def sparse(net: Net, x: Tensor) -> Tensor:
    return net.a(x.flatten(0, 1).to_sparse())


def dual(net: Net, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        y = net.a(forward_ad.make_dual(x, torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(y).tangent
        assert tangent is not None
        return tangent.clone()


def traced(net: Net, x: Tensor) -> Tensor:
    made = cast("Callable[[Tensor], Tensor]", torch.jit.trace(net.a, (x,)))
    return made(x)


def broadcast(net: Net, x: Tensor) -> Tensor:
    net.a.bias = nn.Parameter(torch.ones(1))
    return net.a(x)


def counted_flops(net: Net, x: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        net.a(x)
    return torch.tensor([float(counter.get_total_flops())])


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("act", [sparse, dual, traced, broadcast, counted_flops])
def test_what_only_torch_does_is_left_to_torch(act: Callable[[Net, Tensor], Tensor]):
    """Sparse inputs, forward-mode derivatives, tracing, a bias of one element, counting modes."""
    nets = made(once).float(), directly(made(once).float(), alone())
    plain, found = (act(net, rows(0, 0).float()) for net in nets)
    assert difference(found.detach(), plain.detach()) <= 1e-5


def test_what_a_hook_keeps_of_an_input_is_a_tensor():
    """It is the input itself, of no other class."""
    net, seen = made(once), list[Tensor]()
    model = directly(net, alone())
    net.a.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    x = rows(0, 0)
    model(x)
    assert seen[0] is x


class Silent(torch.autograd.Function):
    """Gives its input on, and no gradient back."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, __: Tensor) -> None:
        return None


def test_no_gradient_is_no_zeros():
    """A weight behind something that gives none back keeps none."""
    net = made(once)
    model = directly(net, alone())
    (Silent.apply(net.b(rows(0, 0))).sum() + net.a(rows(0, 0)).sum()).backward()
    assert net.b.weight.grad is None
    assert net.a.weight.grad is not None
    assert model is net


def test_a_hook_that_comes_between_the_passes_is_heard(written: list[str]):
    """One put on the weight after the forward pass changes the gradient."""
    plain, net = made(once), directly(made(once), alone())
    for each in (plain, net):
        y = each(rows(0, 0)).square().sum()
        each.a.weight.register_hook(lambda grad: grad * 2)
        y.backward()
    assert written == ["b.weight"]
    assert difference(there(net.a.weight), there(plain.a.weight)) <= 1e-12


def penalty_in(block: "Wide", x: Tensor) -> Tensor:
    return torch.tanh(block.lin(x)) + block.lin.weight.square().mean()


def decoder(block: "Wide", x: Tensor) -> Tensor:
    return torch.tanh(block.lin(x)) @ block.lin.weight


def transposed(block: "Wide", x: Tensor) -> Tensor:
    return torch.tanh(block.lin(x)) @ block.lin.weight.t()


def elementwise(block: "Wide", x: Tensor) -> Tensor:
    return torch.tanh(block.lin(x)) * block.lin.weight[0]


def twice(block: "Wide", x: Tensor) -> Tensor:
    return block.lin(torch.tanh(block.lin(x)))


def of_a_constant(block: "Wide", x: Tensor) -> Tensor:
    """Behind the fork that the constant's way leads into."""
    return block.lin(torch.tanh(x * block.lin(torch.ones_like(x))))


def looked_up(block: "Wide", x: Tensor) -> Tensor:
    """An embedding whose table is the layer's weight."""
    ids = (100 * x[:, 0].detach()).long() % WIDE
    return torch.tanh(block.lin(x)) + functional.embedding(ids, block.lin.weight)


USES = [penalty_in, decoder, transposed, elementwise, twice, of_a_constant, looked_up]


class Wide(nn.Module):
    """A large layer, whose weight is used in other ways too."""

    def __init__(self, use: Callable[["Wide", Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.use = nn.Linear(WIDE, WIDE), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def halved(world: World, plan: str, use: Callable[[Wide, Tensor], Tensor]) -> list[float]:
    """The losses of three steps on two such blocks."""
    model = settled(nn.Sequential(Wide(use), Wide(use), Wide(use), nn.Linear(WIDE, 3)))
    optimizer = sw.Optim(torch.optim.SGD, lr=1e-4)
    engine = sw.parallelize(model, plan, world, optimizer=optimizer, loss=regression)
    return [engine.step(mine(engine, batch(step))).loss for step in range(3)]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("plan", ["pp2 1f1b:2 fp64", "pp2 zb-h1:2 fp64", "pp2 zb-v:2 fp64"])
def test_a_weight_that_is_used_in_other_ways_too_is_trained_once(plan: str, use: Any):
    """Whatever half of the backward pass makes a part of its gradient."""
    expected = run_threads(1, halved, "fp64", use)[0]
    for losses in run_threads(2, halved, plan, use):
        assert losses == pytest.approx(expected, rel=1e-11)
