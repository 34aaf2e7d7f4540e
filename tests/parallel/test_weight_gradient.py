"""Large linear layers whose weight gradients are added where they are kept: the same gradients."""

from collections import Counter
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
from shardwise.core.schedule.schedule import Step
from shardwise.engine.engine import Engine
from shardwise.flat.flat_gradient import FlatGradient
from shardwise.techniques.data.apply import drivers
from shardwise.techniques.data.weight_gradient import LEAST, take_over
from tests.engine.cases import Case, build, difference, rows_task, settled
from tests.engine.tensors import mine
from tests.pool import run_threads

WIDE = 256  # a square weight has just enough elements
assert LEAST == WIDE * WIDE


class Net(nn.Module):
    """Two wide layers, the second with a bias, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDE, WIDE, bias=False)
        self.b = nn.Linear(WIDE, WIDE)
        self.c = nn.Linear(WIDE, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))) / WIDE


class Silent(torch.autograd.Function):
    """Gives its input on, and no gradient back."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, __: Tensor) -> None:
        return None


def rows(step: int, rank: int) -> Tensor:
    own = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 3, WIDE, generator=own, dtype=torch.float64)


def net_of() -> Net:
    net = Net().double()
    settled(net)
    return net


def directly(net: Net, world: World) -> Net:
    """The net wrapped, with the large gradients written where they are kept."""
    sw.DDP(net, world)
    [data] = drivers(net)
    take_over(net, data, {p: p.numel() for p in net.parameters()})
    return net


def grads(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in net.named_parameters()}


def assert_equal(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    for name, grad in wanted.items():
        assert (found[name] is None) == (grad is None), name
        assert grad is None or difference(cast("Tensor", found[name]), grad) <= 1e-12, name


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The weights whose gradients have been written directly, in order."""
    names, plain = list[str](), FlatGradient.add_product

    def call(self: FlatGradient, index: int, *args: Any) -> None:
        names.append(self.names[index])
        plain(self, index, *args)

    monkeypatch.setattr(FlatGradient, "add_product", call)
    return names


def before(net: Net) -> None:
    net.a.register_forward_pre_hook(lambda _, args: (args[0] * args[0].mean(),))


def behind(net: Net) -> None:
    net.a.register_forward_hook(lambda _, args, y: y * args[0].mean(), prepend=True)


def on_weight(net: Net) -> None:
    net.a.weight.register_hook(lambda grad: grad * 2)


def accumulated(net: Net) -> None:
    def see(p: Tensor) -> None:
        assert p.grad is not None
        vars(net)["seen"] = p.grad.clone()

    net.a.weight.register_post_accumulate_grad_hook(see)


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("hook", "late", "direct"),
    [
        (bool, False, ["b.weight", "a.weight"]),
        (before, False, ["b.weight", "a.weight"]),
        (behind, False, ["b.weight", "a.weight"]),
        (on_weight, False, ["b.weight"]),
        (on_weight, True, ["b.weight"]),
        (accumulated, False, ["b.weight"]),
    ],
)
def test_hooks_are_heard(written: list[str], hook: Any, late: bool, direct: list[str]):
    """On a layer, and on a weight, also after the forward: that gradient goes autograd's way."""
    plain, model, inputs = net_of(), directly(net_of(), alone()), list[Tensor]()
    for each in (plain, model):
        inputs.append(x := rows(0, 0).requires_grad_())
        for now in (False, True):
            loss = each(x).square().sum() if now else x
            if late == now:
                hook(each)
        loss.backward()
    assert written == direct
    assert_equal(grads(model), grads(plain))
    assert_equal({"x": inputs[1].grad}, {"x": inputs[0].grad})
    assert_equal({"seen": vars(model).get("seen")}, {"seen": vars(plain).get("seen")})


def penalty(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients of a penalty on the gradient of the input (arXiv 1704.00028)."""
    x = rows(0, 0).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    return grads(model)


def test_gradients_that_are_asked_for(written: list[str]):
    """torch.autograd.grad leaves none behind; a gradient can be differentiated; autocast."""
    plain, model = net_of(), directly(net_of(), alone())
    loss = lambda net: net(rows(0, 0)).square().sum()  # noqa: E731
    asked, wanted = (torch.autograd.grad(loss(n), [*n.parameters()]) for n in (model, plain))
    assert all(difference(a, b) <= 1e-12 for a, b in zip(asked, wanted, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert written == []
    assert_equal(penalty(model), penalty(plain))
    written.clear()
    narrow = directly(net_of().float(), alone())
    with torch.autocast("cpu", torch.bfloat16):
        loss = narrow(rows(0, 0).float()).square().sum()
    loss.backward()
    assert written == []
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in narrow.parameters())


def dual(net: Net, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(net.a(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        assert tangent is not None
        return tangent.clone()


def broadcast(net: Net, x: Tensor) -> Tensor:
    net.a.bias = nn.Parameter(torch.ones(1))
    return net.a(x)


def counted_flops(net: Net, x: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        net.a(x)
    return torch.tensor([float(counter.get_total_flops())])


def raised(net: Net, _: Tensor) -> str:
    """An input that does not fit is told as torch tells, and leaves nothing behind."""
    weight, texts = net.a.weight, ""
    for bad in ((2, WIDE + 1), ()):
        with pytest.raises((RuntimeError, IndexError)) as told:
            net.a(torch.ones(bad))
        texts += str(told.value)
    assert net.a.weight is weight
    return texts


def seen_by_a_hook(net: Net, x: Tensor) -> bool:
    seen: list[Tensor] = []
    net.a.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    net(x)
    return seen[0] is x


LEFT: list[Callable[[Net, Tensor], Any]] = [
    *(dual, broadcast, counted_flops, raised, seen_by_a_hook),
    lambda net, x: net.a(x.flatten(0, 1).to_sparse()),
    lambda net, x: cast("Callable[[Tensor], Tensor]", torch.jit.trace(net.a, (x,)))(x),
]


@pytest.mark.cases(len(LEFT))
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("act", LEFT)
def test_what_only_torch_does_is_left_to_torch(act: Callable[[Net, Tensor], Any]):
    """Sparse inputs, forward-mode derivatives, tracing, broadcast biases, counting, errors."""
    nets = net_of().float(), directly(net_of().float(), alone())
    plain, found = (act(net, rows(0, 0).float()) for net in nets)
    if isinstance(plain, Tensor):
        assert difference(found.detach(), plain.detach()) <= 1e-5
    else:
        assert found == plain


class Wide(nn.Module):
    """A large layer, whose weight is used in other ways too."""

    def __init__(self, use: Callable[["Wide", Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.use = nn.Linear(WIDE, WIDE), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def looked_up(block: Wide, x: Tensor) -> Tensor:
    """An embedding whose table is the layer's weight."""
    ids = (100 * x[:, 0].detach()).long() % WIDE
    return torch.tanh(block.lin(x)) + functional.embedding(ids, block.lin.weight)


USES: dict[str, Callable[[Wide, Tensor], Tensor]] = {
    "once": lambda b, x: torch.tanh(b.lin(x)),
    "penalty": lambda b, x: torch.tanh(b.lin(x)) + b.lin.weight.square().mean(),
    "decoder": lambda b, x: torch.tanh(b.lin(x)) @ b.lin.weight,
    "transposed": lambda b, x: torch.tanh(b.lin(x)) @ b.lin.weight.t(),
    "elementwise": lambda b, x: torch.tanh(b.lin(x)) * b.lin.weight[0],
    "twice": lambda b, x: b.lin(torch.tanh(b.lin(x))),
    # behind the fork that the constant's way leads into
    "of a constant": lambda b, x: b.lin(torch.tanh(x * b.lin(torch.ones_like(x)))),
    "looked up": looked_up,
    "in place": lambda b, x: b.lin(x).tanh_(),
    "recomputed": lambda b, x: checkpoint(b.lin, torch.tanh(x), use_reentrant=False),
    "unused": lambda b, x: (b.lin(x), torch.tanh(x))[1],
    "no gradient is no zeros": lambda b, x: Silent.apply(b.lin(x)) + x,
}
#: Plans, and how many gradients all ranks write directly in a step if each weight is used once.
PLANS = {"dp2": 0, "dp2 zero2 accumulate:2": 12, "pp2 1f1b:2": 6, "pp2 zb-h1:2": 6, "pp2 zb-v:2": 6}


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.cat([rows(step, rank).flatten(0, 1) for rank in range(2)])[:8]
    return x, x[:, :3].sin()


def of_uses(use: str) -> nn.Module:
    return settled(nn.Sequential(*(Wide(USES[use]) for _ in range(3)), nn.Linear(WIDE, 3)))


def counting(world: World, plan: str, use: str) -> tuple[Engine, list[int]]:
    """An engine, and how many gradients its steps have written directly so far."""
    how: Any = {"kind": torch.optim.SGD, "options": {"lr": 1e-6, "weight_decay": 0.5}}
    engine = build(world, rows_task(partial(of_uses, use), batch), Case(f"{plan} fp64", **how))
    count = [0]

    def counted(grads: FlatGradient, *args: Any) -> None:
        count[0] += 1
        FlatGradient.add_product(grads, *args)

    for flat in engine.flats:
        vars(flat.grads)["add_product"] = partial(counted, flat.grads)
    return engine, count


def trained(world: World, plan: str, use: str) -> tuple[list[float], int]:
    """The losses of three steps, and how many gradients the last one wrote directly."""
    (engine, count), losses = counting(world, plan, use), list[float]()
    for step in range(3):
        count[0] = 0
        losses.append(engine.step(mine(engine, batch(step))).loss)
    return losses, count[0]


@pytest.mark.cases(12)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("plan", PLANS)
def test_a_weight_that_is_used_in_other_ways_too_is_trained_once(plan: str, use: str):
    """Whatever half of the backward pass makes a part of its gradient, and where it is written."""
    expected = run_threads(1, trained, "ddp", use)[0][0]
    found = run_threads(2, trained, plan, use)
    assert [losses for losses, _ in found] == [pytest.approx(expected, rel=1e-11)] * 2
    assert use != "once" or sum(count for _, count in found) == PLANS[plan]


def products_by_action(world: World) -> Counter[str]:
    """How many weight gradients each kind of action of this rank writes."""
    made, before = Counter[str](), [0]
    engine, count = counting(world, "pp2 zb-h1:2", "once")

    def watch(step: Step) -> None:
        made[step.op] += count[0] - before[0]
        before[0] = count[0]

    engine.passes.watch = watch
    engine.step(mine(engine, batch(0)))
    return made


def test_weight_gradients_are_made_in_w():
    """Under zero bubble I makes none of a large layer, for which the previous stage would wait."""
    for made in run_threads(2, products_by_action):
        assert made["I"] == 0 < made["W"]
