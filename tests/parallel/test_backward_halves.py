"""The backward pass in halves is the whole one: the same gradients, no product made twice."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardwise.techniques.pipeline.backward import StageTape
from tests.engine.cases import settled

ROWS, WIDTH = 3, 4


class Lambda(nn.Module):
    """A stage whose forward is a function of itself and the given."""

    def __init__(self, forward: Callable[..., tuple[Tensor, ...]], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.do = forward

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        return self.do(self, *given)


class Product(torch.autograd.Function):
    """x @ w with all of its gradients made at once, and counted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, calls: Counter[str]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.calls = calls
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.calls["product"] += 1
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad, None


class Same(torch.autograd.Function):
    """x itself: a custom Function for a weight to go through."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape or (WIDTH, WIDTH)))


def mlp() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh(), nn.LayerNorm(WIDTH), linear())


def stage(forward: Callable[..., Any], **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: Lambda(
        lambda *args: (out,) if isinstance(out := forward(*args), Tensor) else out,
        **{name: make() for name, make in parts.items()},
    )


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, 1:] *= m.w
    y[0].add_(m.v[0])
    return y.tanh_()


def twice(m: Any, x: Tensor) -> Tensor:
    w = m.w.sin()[:ROWS]
    return torch.addcmul(x, w, w) @ m.w


def made_of_another(m: Any, x: Tensor) -> Tensor:
    w = m.w.sin()
    return torch.tanh(x @ w) @ w.exp() + m.w[:ROWS]


def calls(m: Any) -> Counter[str]:
    return m.__dict__.setdefault("calls", Counter())


def again(m: Any, x: Tensor, *, reentrant: bool) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        calls(m)["made"] += 1
        return m.b(m.norm(torch.tanh(m.a(x))))

    out: Any = checkpoint(inner, x, use_reentrant=reentrant)
    return m.c(out)


def branch_again(m: Any, x: Tensor) -> Tensor:
    made: Any = checkpoint(lambda w: torch.sin(w).square(), m.w, use_reentrant=False)
    return m.a(x) @ made


STAGES: dict[str, Callable[[], nn.Module]] = {
    "layers": stage(lambda m, x: m.a(x), a=mlp),
    "transformer": stage(
        lambda m, x: m.a(x), a=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0)
    ),
    "no parameter": stage(lambda _, x: x.sin()),
    "the given itself": stage(lambda m, x: (x, m.a(x)), a=linear),
    "a part of the given": stage(lambda m, x: (x[1:], x.detach()[:1] * m.w), w=weight),
    "of weights alone": stage(lambda m, x: (m.a(x), m.w.exp()), a=linear, w=weight),
    "only of weights": stage(lambda m, _: m.a(m.w.exp()), a=linear, w=weight),
    "two outputs share": stage(lambda m, x: (m.a(x), m.a(m.w)), a=linear, w=weight),
    "two given": stage(lambda m, x, y: m.a(x) * m.b(y), a=linear, b=linear),
    "one given unused": stage(lambda m, x, _: m.a(x), a=linear),
    "layer used twice": stage(lambda m, x: m.a(torch.tanh(m.a(x))), a=linear),
    "twice in one node, and elsewhere": stage(twice, w=weight),
    "made of another": stage(made_of_another, w=weight),
    "stack of experts": stage(
        lambda m, x: torch.stack([x @ m.w[k] for k in range(3)]).tanh().sum(0),
        w=lambda: weight(3, WIDTH, WIDTH),
    ),
    "weight norm": stage(lambda m, x: m.a(x), a=lambda: parametrizations.weight_norm(linear())),
    "in place": stage(in_place, a=linear, w=lambda: weight(WIDTH - 1), v=weight),
    "custom function": stage(
        lambda m, x: m.b(
            Product.apply(torch.tanh(Product.apply(m.a(x), m.w, calls(m))), m.v, calls(m))
        ),
        **dict.fromkeys("ab", linear),
        **dict.fromkeys("vw", weight),
    ),
    "weights through functions": stage(
        lambda m, x: Product.apply(m.a(x), Same.apply(Same.apply(m.w)), calls(m)) @ Same.apply(m.v),
        a=linear,
        **dict.fromkeys("vw", weight),
    ),
    **{
        f"recomputed{how}": stage(
            partial(again, reentrant=bool(how)),
            **dict.fromkeys("abc", linear),
            norm=lambda: nn.LayerNorm(WIDTH),
        )
        for how in ("", ", reentrant")
    },
    "recomputed branch": stage(branch_again, a=linear, w=weight),
    "embedding": stage(
        lambda m, x: m.a(x + m.e(torch.arange(ROWS))), a=linear, e=lambda: nn.Embedding(5, WIDTH)
    ),
    "frozen": stage(lambda m, x: m.b(m.a(x)), a=lambda: linear().requires_grad_(False), b=linear),
    "all frozen": stage(lambda m, x: m.a(x), a=lambda: linear().requires_grad_(False)),
}
GIVEN = {"two given": 2, "one given unused": 2}


def given(name: str) -> list[Tensor]:
    own = torch.Generator().manual_seed(7)
    found = []
    for _ in range(GIVEN.get(name, 1)):
        x = torch.randn(ROWS, WIDTH, generator=own, dtype=torch.float64)
        found.append(x.requires_grad_())
    return found


def made(name: str) -> nn.Module:
    return settled(STAGES[name]()).double()


def gradients(outputs: list[Tensor]) -> list[Tensor]:
    return [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).cos() for y in outputs]


def played(name: str, module: nn.Module, xs: list[Tensor], how: str) -> list[Tensor | None]:
    """The gradients of the given, by the usual backward pass, by the tape at once, or in halves."""
    outputs = [y for y in module(*xs) if y.requires_grad]
    grads = gradients(outputs)
    if how == "autograd":
        torch.autograd.backward(outputs, grads)
        return [x.grad for x in xs]
    tape = StageTape(xs, outputs)
    del outputs  # the tape alone holds the graph
    if how == "whole":
        return tape.backward(grads)
    found, rest = tape.inputs(grads)
    # after I no parameter has a gradient, but where I is all of B
    got = any(p.grad is not None for p in module.parameters())
    assert got == (name in ("recomputed, reentrant", "recomputed branch"))
    rest.weights()
    return found


WAYS = pytest.mark.parametrize("how", ["whole", "halves"])


def assert_near(found: Any, wanted: Any, times: int = 1) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            bound = 1e-12 * max(1.0, float(other.abs().max()))
            assert float((one - times * other).abs().max()) <= times * bound


@pytest.mark.cases(2 * len(STAGES))
@WAYS
@pytest.mark.parametrize("name", STAGES)
def test_gradients_are_those_of_autograd(name: str, how: str):
    """Each given and parameter gets its gradient, whose hook is called once; a second pass adds."""
    plain, module, hooks = made(name), made(name), Counter[str]()
    xs, wanted = given(name), played(name, plain, given(name), "autograd")
    for n, p in module.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _, n=n: hooks.update([n]))
    assert_near(played(name, module, xs, how), wanted)
    assert all(x.grad is None for x in xs)
    weights = {n: p.grad for n, p in plain.named_parameters()}
    assert_near([p.grad for p in module.parameters()], weights.values())
    once = {n: 1 for n, g in weights.items() if g is not None}
    assert name == "recomputed, reentrant" or hooks == once
    module.zero_grad()
    for _ in range(2):
        xs = given(name)
        outputs = [y for y in module(*xs) if y.requires_grad]
        StageTape(xs, outputs).inputs(gradients(outputs))[1].weights()
    assert_near([p.grad for p in module.parameters()], weights.values(), times=2)


@WAYS
def test_a_stage_that_is_given_nothing_to_differentiate(how: str):
    """The first stage: None for the given, and all the weights' gradients."""
    plain, module = made("layers"), made("layers")
    played("layers", plain, given("layers"), "autograd")
    assert played("layers", module, [x.detach() for x in given("layers")], how) == [None]
    assert_near([p.grad for p in module.parameters()], [p.grad for p in plain.parameters()])


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.count += func.overloadpacket in (aten.mm, aten.addmm, aten.bmm)
        return func(*args, **(kwargs or {}))


def products(act: Callable[[], Any]) -> tuple[int, Any]:
    with Products() as mode:
        out = act()
    return mode.count, out


COUNTS = {
    "layers": (2, 2, 2),
    "two given": (2, 2, 2),
    "layer used twice": (2, 4, 0),
    "stack of experts": (3, 3, 3),
    "weight norm": (1, 1, 1),
    "in place": (1, 1, 1),
    "only of weights": (1, 0, 2),
    "embedding": (1, 1, 1),
    "custom function": (4, 6, 2),
    "frozen": (2, 2, 1),
}


@pytest.mark.cases(len(COUNTS))
@pytest.mark.parametrize("name", COUNTS)
def test_no_product_is_made_twice(name: str):
    """Of a linear layer F, I and W make one product each; a custom Function makes all in I."""
    module, xs = made(name), given(name)
    f, outputs = products(lambda: [y for y in module(*xs) if y.requires_grad])
    tape = StageTape(xs, outputs)
    i, (_, rest) = products(lambda: tape.inputs(gradients(outputs)))
    w, _ = products(rest.weights)
    assert (f, i, w) == COUNTS[name]
    assert calls(module)["product"] in (0, 2)


def test_activations_are_made_again_once():
    """Under checkpointing I makes them, and W has no need of them."""
    module = made("recomputed")
    played("recomputed", module, given("recomputed"), "halves")
    assert calls(module)["made"] == 2


@WAYS
def test_hooks_on_tensors_change_gradients_once(how: str):
    """A hook on a gradient inside a stage, or on a parameter's, and hooks on saved tensors."""

    def doubled(_: nn.Module, __: Any, y: Tensor) -> None:
        y.register_hook(lambda g: 2 * g)

    found: list[list[Any]] = []
    for each in (how, "autograd"):
        module: Any = made("layers")
        module.a[0].register_forward_hook(doubled)
        module.a[0].bias.register_hook(lambda g: 3 * g)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: [x], lambda kept: kept[0]):
            into = played("layers", module, given("layers"), each)
        found.append([*into, *(p.grad for p in module.parameters())])
    assert_near(found[0], found[1])


@pytest.mark.cases(8)
@WAYS
@pytest.mark.parametrize("name", STAGES)
def test_nothing_of_the_graph_is_left(name: str, how: str):
    """With the tape played, nothing that the forward pass made or was given is alive."""
    gc.disable()
    try:
        module, xs = made(name), given(name)
        seen: list[weakref.ref[Any]] = [weakref.ref(x) for x in xs]

        def note(_: nn.Module, __: Any, out: Any) -> None:
            every = out if isinstance(out, tuple) else (out,)
            seen.extend(weakref.ref(y) for y in every if isinstance(y, Tensor))

        for part in module.modules():
            part.register_forward_hook(note)
        played(name, module, xs, how)
        del xs
        assert [r for r in seen if r() is not None] == []
    finally:
        gc.enable()
