"""Recipes, and optimizers that are not known: tried when made, refused where they cannot work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.comm.world import World, alone, traced
from shardwise.core.errors import InputError
from shardwise.engine.optimizer.elementwise import ELEMENTWISE, works_on_pieces
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from tests.checkpoint.own import Own
from tests.engine.cases import regression, settled, vectors
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


class Whole(torch.optim.Muon):
    """A class of the user's that keeps what makes Muon need whole matrices."""


def fsdp(world: World, of: type[Optimizer], after: bool = True) -> str:
    """A first step in a plain loop, of an optimizer made before or after: "" or the error."""
    module = settled(nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)))
    options: Any = {"lr": 0.0}  # the begin of a warm-up
    optim = None if after else of(module.parameters(), **options)
    module = sw.FSDP(module, world=world)
    optim = optim or of(module.parameters(), **options)
    module(rows(0, world.rank).float()).sum().backward()
    try:
        optim.step(lambda: 0.0)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.cases(3)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "of",
    [*WHOLE, torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS, Whole],
    ids=lambda of: of.__name__,
)
def test_what_needs_whole_tensors_is_refused_on_parts(of: type[Optimizer], after: bool):
    """A piece of a matrix has two dimensions: Muon would take it, and compute something else."""
    for text in run_threads(2, fsdp, of, after):
        assert f"a step of {of.__name__}, which needs whole tensors" in text


@pytest.mark.parametrize("of", WHOLE, ids=lambda of: of.__name__)
def test_plans_whose_ranks_hold_parts_refuse_it(of: type[Optimizer]):
    """By name; not under ddp."""
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


def test_such_an_optimizer_works_where_parameters_are_whole():
    """Under sw.DDP, and in plain PyTorch beside Shardwise."""
    model = sw.DDP(nn.Linear(6, 8, bias=False), sw.init())
    for optim in (torch.optim.Muon(model.parameters()), torch.optim.Adafactor([torch.zeros(2, 2)])):
        optim.step()


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


# --- recipes ------------------------------------------------------------------------------------


class Signed(Optimizer):
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
    "a rate in words": (lambda: sw.SGD(lr="fast"), r"sw\.SGD\(lr='fast'\), which SGD refuses"),  # type: ignore[arg-type]
    "an unknown option": (lambda: sw.AdamW(nonsense=1), "the options of AdamW: lr, betas, eps"),  # type: ignore[arg-type]
    "betas": (lambda: sw.Adam(betas=(1.5, 2)), "Invalid beta parameter"),
    "one beta": (lambda: sw.Adam(betas=(0.9,)), "which Adam refuses"),  # type: ignore[arg-type]
    "no pair": (lambda: sw.Adam(betas=0.9), "which Adam refuses"),  # type: ignore[arg-type]
    "together": (lambda: sw.SGD(lr=0.1, nesterov=True), "Nesterov momentum requires"),
    "of a group": (lambda: sw.SGD(lr=0.1, groups={"*": {"lr": -1}}), "Invalid learning rate: -1"),
    "slip in a group": (
        lambda: sw.AdamW(groups={"*.bias": {"weight_deacy": 0}}),
        r"the options of AdamW: lr, betas.*Write instead: sw\.AdamW\(weight_decay=0\)",
    ),
    "a slip": (
        lambda: sw.SGD(lr=0.1, momentun=0.9),  # type: ignore[call-arg]
        r"Write instead: sw\.SGD\(momentum=0\.9\)",
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
    "your own": (lambda: sw.Optim(Signed, rate=1), "the options of Signed: lr"),
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
    recipe = sw.Optim(Signed, lr=0.25, groups={"*.bias": {"twice": True}})
    model = make("stack")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sw.parallelize(model, "fp64", alone(), optimizer=recipe, loss=regression).step(vectors(0))
    for name, p in model.named_parameters():
        moved = (p - before[name]).abs().max().item()
        assert moved == pytest.approx(0.5 if name.endswith("bias") else 0.25)
