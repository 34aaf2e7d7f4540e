"""Large weights in the hands of torch and of the user: hooks, tracing, what has no product."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from shardwise.comm.world import alone
from tests.engine.cases import difference
from tests.parallel.test_linear import WIDE, Net, directly, made, once, rows, there, written

__all__ = ["written"]  # a fixture


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
