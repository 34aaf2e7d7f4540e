"""Stages in miniature for the backward pass, with every way in which weights join the graph.

Each is given tensors [ROWS, WIDTH] and makes a tuple of outputs.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

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
    """How a stage is made whose parts are made by `parts`."""
    return lambda: Lambda(
        lambda *args: (out,) if isinstance(out := forward(*args), Tensor) else out,
        **{name: make() for name, make in parts.items()},
    )


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, 1:] *= m.w
    y[0].add_(m.v[0])
    return y.tanh_()


def used_twice(m: Any, x: Tensor) -> Tensor:
    w = m.w.sin()
    return torch.tanh(x @ w) @ w


def twice(m: Any, x: Tensor) -> Tensor:
    w = m.w.sin()[:ROWS]
    return torch.addcmul(x, w, w) @ m.w


def made_of_another(m: Any, x: Tensor) -> Tensor:
    w = m.w.sin()
    return torch.tanh(x @ w) @ w.exp() + m.w[:ROWS]


def looped(m: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(m.norm(m.a(x)))
    return x


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
    "residual": stage(lambda m, x: x + m.a(x), a=mlp),
    "convolution": stage(
        lambda m, x: m.a(x[:, None])[:, 0], a=lambda: nn.Conv1d(1, 1, 3, padding=1)
    ),
    "transformer": stage(
        lambda m, x: m.a(x), a=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0)
    ),
    "recurrent": stage(lambda m, x: m.a(x)[0], a=lambda: nn.GRU(WIDTH, WIDTH)),
    "no parameter": stage(lambda _, x: x.sin()),
    "the given itself": stage(lambda m, x: (x, m.a(x)), a=linear),
    "a part of the given": stage(lambda m, x: (x[1:], x.detach()[:1] * m.w), w=weight),
    "of weights alone": stage(lambda m, x: (m.a(x), m.w.exp()), a=linear, w=weight),
    "only of weights": stage(lambda m, _: m.a(m.w.exp()), a=linear, w=weight),
    "two outputs share": stage(lambda m, x: (m.a(x), m.a(m.w)), a=linear, w=weight),
    "two given": stage(lambda m, x, y: m.a(x) * m.b(y), a=linear, b=linear),
    "one given unused": stage(lambda m, x, _: m.a(x), a=linear),
    "layer used twice": stage(lambda m, x: m.a(torch.tanh(m.a(x))), a=linear),
    "weight used twice": stage(lambda m, x: ((x @ m.w).tanh() @ m.w) * m.w.sum(), w=weight),
    "loop of one layer": stage(looped, a=linear, norm=lambda: nn.LayerNorm(WIDTH)),
    "one scale thrice": stage(
        lambda m, x: ((x * m.w).sin() * m.w).cos() + m.w, w=lambda: weight(WIDTH)
    ),
    "twice in one node": stage(lambda m, x: torch.addcmul(x, m.w[:ROWS], m.w[:ROWS]), w=weight),
    "twice in one node, and elsewhere": stage(twice, w=weight),
    "function of a function": stage(
        lambda m, x: Product.apply(x, Same.apply(m.w), calls(m)), w=weight
    ),
    "norm of two": stage(
        lambda m, x: m.norm(m.a(x)) * m.norm(m.b(x)),
        **dict.fromkeys("ab", linear),
        norm=lambda: nn.LayerNorm(WIDTH),
    ),
    "one made, used twice": stage(used_twice, w=weight),
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
    "custom function, twice": stage(
        lambda m, x: Product.apply(
            torch.tanh(Product.apply(x, m.w, calls(m))) @ m.w, m.w, calls(m)
        ),
        w=weight,
    ),
    "weights through functions": stage(
        lambda m, x: Product.apply(m.a(x), Same.apply(Same.apply(m.w)), calls(m)) @ Same.apply(m.v),
        a=linear,
        **dict.fromkeys("vw", weight),
    ),
    "recomputed": stage(
        partial(again, reentrant=False),
        **dict.fromkeys("abc", linear),
        norm=lambda: nn.LayerNorm(WIDTH),
    ),
    "recomputed, reentrant": stage(
        partial(again, reentrant=True),
        **dict.fromkeys("abc", linear),
        norm=lambda: nn.LayerNorm(WIDTH),
    ),
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
