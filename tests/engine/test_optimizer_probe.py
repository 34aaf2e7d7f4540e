"""Optimizers that are not known are tried: those that need whole tensors are refused on parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import shardwise as sw
from shardwise.comm.world import World, alone, traced
from shardwise.core.errors import InputError
from shardwise.engine.elementwise import works_on_pieces
from tests.checkpoint.own import Own
from tests.engine.cases import regression, vectors
from tests.engine.loops import rows
from tests.engine.zoo import make
from tests.pool import run_threads

Update = Callable[[Any, Tensor, Tensor], Tensor]


def kind(name: str, update: Update, before: Callable[[Any], Any] = lambda _: None) -> type:
    """A class of a program: `update` gives what is subtracted from a parameter, times the rate."""

    def init(self: Any, params: Any, lr: float = 1e-3) -> None:
        Optimizer.__init__(self, params, {"lr": lr})

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> None:
        before(self)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(group["lr"] * update(self, p, p.grad))

    return type(name, (Optimizer,), {"__init__": init, "step": step})


def lamb(_: Any, p: Tensor, g: Tensor) -> Tensor:
    return g * p.norm() / g.norm().clamp(min=1e-6) if p.ndim > 1 else g


def means(_: Any, p: Tensor, g: Tensor) -> Tensor:
    if p.ndim < 2 or min(p.shape) < 100:  # as many factor large matrices only
        return g
    return g / g.square().mean(1, keepdim=True).sqrt()


def polar(_: Any, p: Tensor, g: Tensor) -> Tensor:
    if p.ndim != 2 or min(p.shape) < 2:
        return g
    u, _, v = torch.linalg.svd(g, full_matrices=False)
    return u @ v


def late(self: Any, p: Tensor, g: Tensor) -> Tensor:
    state = self.state[p]
    state["step"] = state.get("step", 0) + 1
    return g if state["step"] < 10 else g / g.norm()


def sign(_: Any, p: Tensor, g: Tensor) -> Tensor:
    return g.sign()


def add_norm(self: Any) -> None:
    every = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
    self.total = torch.stack([g.norm() for g in every]).norm()


def count(self: Any) -> None:
    self.calls = getattr(self, "calls", 0) + 1


LAMB, MEANS, POLAR = kind("Lamb", lamb), kind("Means", means), kind("Polar", polar)
LATE, SIGN = kind("Late", late), kind("Sign", sign)
CLIPPED = kind("Clipped", lambda self, _, g: g / self.total, add_norm)
COUNTED = kind("Counted", lambda self, _, g: g / self.calls, count)
WHOLE = [LAMB, MEANS, POLAR, LATE, CLIPPED]


def fsdp(world: World, of: type[Optimizer]) -> str:
    """A first step in a plain loop: "" or the error."""
    module = sw.FSDP(make("stack").double(), world=world)
    options: Any = {"lr": 0.0}
    optim = of(module.parameters(), **options)  # the begin of a warm-up
    module(rows(0, world.rank)).sum().backward()
    try:
        optim.step()
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("of", WHOLE, ids=lambda of: of.__name__)
def test_what_needs_whole_tensors_is_refused_on_parts(of: type[Optimizer]):
    """By name, in a loop over sw.FSDP and by plans whose ranks hold parts; not under ddp."""
    for text in run_threads(2, fsdp, of):
        assert f"a step of {of.__name__}, which needs whole tensors" in text
    for plan in ("dp2 zero1", "dp2 zero3", "tp2"):
        with pytest.raises(InputError, match=rf"{of.__name__} (under the plan|in an engine)"):
            sw.parallelize(
                make("stack"), plan, traced(0, 2), optimizer=sw.Optim(of), loss=regression
            )


@pytest.mark.parametrize("of", [SIGN, COUNTED, Own], ids=lambda of: of.__name__)
def test_what_updates_each_element_alone_is_taken(of: type[Optimizer]):
    """With numbers, lists and counts among its states, and a rate of 0 at first."""
    assert run_threads(2, fsdp, of) == ["", ""]


@pytest.mark.parametrize("of", [CLIPPED, COUNTED], ids=lambda of: of.__name__)
def test_an_engine_refuses_what_combines_parameters(of: type[Optimizer]):
    """It steps unit by unit: a norm, or a count of steps, over all would be another."""
    with pytest.raises(InputError, match=f"{of.__name__} in an engine, which updates unit by unit"):
        sw.parallelize(make("stack"), "ddp", alone(), optimizer=sw.Optim(of), loss=regression)


def test_whole_tensors_are_fine_where_ranks_have_them():
    """Under ddp, and under sw.DDP, an optimizer of a program trains as it does alone."""
    model, plain = make("stack").double(), make("stack").double()
    sw.parallelize(model, "fp64", alone(), optimizer=sw.Optim(LAMB, lr=0.1), loss=regression).step(
        vectors(0)
    )
    optim = LAMB(plain.parameters(), lr=0.1)
    regression(plain, vectors(0)).backward()
    optim.step()
    assert all(map(torch.allclose, model.parameters(), plain.parameters()))


def test_what_cannot_be_tried_is_warned_of():
    """An optimizer that steps only with a closure."""

    def closed(self: Any) -> None:
        raise RuntimeError("needs a closure")

    with pytest.warns(UserWarning, match="Closed could not be tried"):
        assert works_on_pieces(kind("Closed", sign, closed), [{"lr": 0.1}])


def test_the_program_s_random_numbers_stay():
    """The trial draws none of them."""
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    noisy = kind("Noisy", lambda *given: given[2] + torch.rand_like(given[2]))
    assert not works_on_pieces(noisy, [{"lr": 0.1}])
    assert torch.equal(torch.rand(2), want)
