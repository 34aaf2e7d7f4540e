"""A recipe is tried when it is made: what torch takes is taken, and the rest answered in words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.comm.world import alone
from shardwise.core.errors import InputError
from shardwise.engine.elementwise import ELEMENTWISE
from shardwise.engine.optimizer_spec import OptimizerSpec
from tests.engine.cases import regression, vectors
from tests.engine.zoo import make


class Sign(Optimizer):
    """An optimizer of the user's own, with a key of its own in its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "twice": False})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                p.data.add_(p.grad.sign(), alpha=-group["lr"] * (1 + group["twice"]))


BAD: dict[str, tuple[Callable[[], OptimizerSpec], str]] = {
    "a rate below zero": (lambda: sw.AdamW(lr=-1), r"sw\.AdamW\(lr=-1\).*Invalid learning rate"),
    "no number": (lambda: sw.AdamW(lr=float("nan")), "Invalid learning rate: nan"),
    "a rate in words": (lambda: sw.SGD(lr="fast"), r"sw\.SGD\(lr='fast'\), which SGD refuses"),
    "an unknown option": (lambda: sw.AdamW(nonsense=1), "the options of AdamW: lr, betas, eps"),
    "betas": (lambda: sw.Adam(betas=(1.5, 2)), "Invalid beta parameter"),
    "one beta": (lambda: sw.Adam(betas=(0.9,)), "which Adam refuses"),
    "no pair": (lambda: sw.Adam(betas=0.9), "which Adam refuses"),
    "together": (lambda: sw.SGD(lr=0.1, nesterov=True), "Nesterov momentum requires"),
    "of a group": (lambda: sw.SGD(lr=0.1, groups={"*": {"lr": -1}}), "Invalid learning rate: -1"),
    "slip in a group": (
        lambda: sw.AdamW(groups={"*.bias": {"weight_deacy": 0}}),
        "the options of AdamW: lr, betas",
    ),
    "a rate in the wrong place": (lambda: sw.AdamW(3e-4), "groups=0.0003"),  # type: ignore[arg-type]
    "parameters": (lambda: sw.AdamW(nn.Linear(2, 2).parameters()), "groups=<generator"),  # type: ignore[arg-type]
    "torch's groups": (lambda: sw.AdamW([{"params": []}]), r"groups=\[\{'params'"),  # type: ignore[arg-type]
    "a number": (lambda: sw.Optim(3), r"sw\.Optim\(3\).*torch\.optim\.RMSprop"),  # type: ignore[arg-type]
    "a module": (lambda: sw.Optim(nn.Linear), r"sw\.Optim\(Linear\)"),  # type: ignore[arg-type]
    "made already": (
        lambda: sw.Optim(torch.optim.SGD([torch.zeros(1)], lr=0.5)),  # type: ignore[arg-type]
        r"sw\.Optim\(SGD.*a subclass of torch\.optim\.Optimizer",
    ),
    "another class": (lambda: sw.Optim(torch.optim.RMSprop, alpha=-1), "Optim.RMSprop, alpha=-1"),
    "not elementwise": (lambda: sw.Optim(torch.optim.LBFGS), "needs whole tensors"),
    "your own": (lambda: sw.Optim(Sign, rate=1), "the options of Sign: lr"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_torch_refuses_is_refused_when_the_recipe_is_made(what: str):
    """With torch's reason and the options there are."""
    act, text = BAD[what]
    with pytest.raises(InputError, match=text) as error:
        act()
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_class_is_taken_without_options(name: str):
    """Torch's own defaults are then the options."""
    assert sw.Optim(getattr(torch.optim, name)).options == {}


@pytest.mark.parametrize("rate", [0, 0.0, 1e-3, torch.tensor(1e-3)])
def test_a_rate_is_a_finite_number_or_a_tensor(rate: Any):
    """A number from 0 up, or a tensor; a group may have its own."""
    assert sw.AdamW(lr=rate).options["lr"] is rate
    assert sw.AdamW(groups={"*.bias": {"lr": rate}}).groups["*.bias"]["lr"] is rate


def test_a_rate_that_is_a_tensor_trains_as_the_number():
    """Through the step, a new rate and the state that a checkpoint needs."""
    runs = []
    for rate in (0.125, torch.tensor(0.125)):
        model = make("stack")
        engine = sw.parallelize(
            model, "fp64", alone(), optimizer=sw.AdamW(lr=rate), loss=regression
        )
        first = engine.step(vectors(0))
        engine.set_lr(0.0625)
        runs.append((first, engine.step(vectors(1)), [p.detach() for p in model.parameters()]))
    (one, two, weights), (first, second, others) = runs
    assert (one, two) == (first, second)
    assert all(map(torch.equal, weights, others))


def test_an_optimizer_of_your_own_has_groups_with_keys_of_its_own():
    """What its class understands in a group is its affair."""
    recipe = sw.Optim(Sign, lr=0.25, groups={"*.bias": {"twice": True}})
    model = make("stack")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sw.parallelize(model, "fp64", alone(), optimizer=recipe, loss=regression).step(vectors(0))
    for name, p in model.named_parameters():
        moved = (p - before[name]).abs().max().item()
        assert moved == pytest.approx(0.5 if name.endswith("bias") else 0.25)
