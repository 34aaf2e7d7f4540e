"""The backward pass in halves is the whole one: the same gradients, and no graph is left."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.techniques.pipeline.stage_work import StageTape
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


def again(m: Any, x: Tensor, *, reentrant: bool) -> Tensor:
    out: Any = checkpoint(lambda x: m.b(torch.tanh(m.a(x))), x, use_reentrant=reentrant)
    return m.c(out)


STAGES: dict[str, Callable[[], nn.Module]] = {
    "layers": stage(lambda m, x: m.a(x), a=mlp),
    "no parameter": stage(lambda _, x: x.sin()),
    "the given itself": stage(lambda m, x: (x, m.a(x)), a=linear),
    "of weights alone": stage(lambda m, x: (m.a(x), m.w.exp()), a=linear, w=weight),
    "only of weights": stage(lambda m, _: m.a(m.w.exp()), a=linear, w=weight),
    "two given": stage(lambda m, x, y: m.a(x) * m.b(y), a=linear, b=linear),
    "one given unused": stage(lambda m, x, _: m.a(x), a=linear),
    **{
        f"recomputed{how}": stage(
            partial(again, reentrant=bool(how)), **dict.fromkeys("abc", linear)
        )
        for how in ("", ", reentrant")
    },
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
    begun = any(p.grad is not None for p in module.parameters())
    assert not begun or any(x.requires_grad for x in xs)  # the first stage leaves all to W
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
