"""Recipes: what they refuse, groups of several classes, and classes that are not known."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.comm.world import World, alone, traced
from shardwise.core.errors import InputError
from shardwise.engine.optimizer.elementwise import ELEMENTWISE
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from tests.engine.cases import Case, difference, regression, rows_task, settled, share, vectors
from tests.engine.loops import rows
from tests.engine.tensors import equals_one, train
from tests.engine.zoo import make
from tests.pool import run_threads


class Elementwise(Optimizer):
    """A class of a program that updates each element alone; `calls` counts its steps."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad.sign(), alpha=group["lr"] / group["calls"])


class Clipped(Optimizer):
    """A class that divides by the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / total, alpha=self.param_groups[0]["lr"])


def fsdp(world: World, of: Any, after: bool, said: bool) -> str:
    """The weights after a first step in a plain loop, or the error.

    The optimizer is made before the wrapping, or after it.
    """
    module = settled(nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)))
    optim: Any = None if after else of(module.parameters(), lr=0.5)
    module = sw.FSDP(module, world=world)
    optim = optim or of(module.parameters(), lr=0.5)
    if said:
        optim.elementwise = True
    module(rows(0, world.rank).float()).sum().backward()
    try:
        optim.step(lambda: 0.0)
    except InputError as error:
        return str(error)
    return str(module.state_dict())


@pytest.mark.cases(3)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("of", [torch.optim.Muon, torch.optim.Adafactor, Elementwise])
def test_pieces_are_only_for_what_is_known_to_update_elements(of: type[Optimizer], after: bool):
    """A piece of a matrix has two dimensions: Muon would take it, and compute something else."""
    for text in run_threads(2, fsdp, of, after, False):
        assert f"a step of {of.__name__} on shards" in text and "optim.elementwise = True" in text


@pytest.mark.parametrize("of", [Elementwise, torch.optim.AdamW])
def test_an_optimizer_may_be_made_before_or_after_the_wrapping(of: type[Optimizer]):
    """In a loop of the program's own, which says that its class updates each element alone."""
    before, after = (run_threads(2, fsdp, of, late, True) for late in (False, True))
    assert before == after and "tensor" in before[0]


LOOKUPS = torch.tensor([[[0, 1, 3], [2, 2, 3]], [[5, 1, 3], [5, 2, 9]], [[7, 1, 3], [0, 0, 0]]])


def looked_up(world: World, ddp: bool = True) -> Tensor:
    """A table after steps of SparseAdam; rows with a gradient of zero have a step of their own."""
    table = nn.Embedding(10, 4, padding_idx=3, sparse=True, dtype=torch.float64)
    head = nn.Linear(4, 1, dtype=torch.float64)
    model = settled(nn.Sequential(table, head, nn.ReLU()))
    model = sw.DDP(model, world=world) if ddp else model
    sparse = torch.optim.SparseAdam([table.weight], lr=0.1)
    dense = torch.optim.SGD(head.parameters(), lr=0.1)
    for step in range(6):
        model(share(LOOKUPS[step % 3], world.rank, world.size)).mean().backward()
        if step == 1:  # the gradients of two passes
            continue
        sparse.step()
        dense.step()
        if step != 3:  # as if a program had forgotten it
            model.zero_grad()
    return table.weight.detach().clone()


def test_sparse_adam_updates_what_any_rank_looked_up():
    """Under sw.DDP, as in one process."""
    wanted = looked_up(alone(), ddp=False)
    for found in run_threads(2, looked_up):
        assert difference(found, wanted) <= 1e-10


@pytest.mark.parametrize("plan", ["dp2 zero2 bf16", "dp2 zero3 fp64", "dp2 offload:optim fp64"])
def test_an_engine_calls_such_a_class_once_in_a_step(plan: str):
    """Whatever the number of units; its pieces are sent to no owner."""
    case = Case(plan, kind=Elementwise, options={"elementwise": True}, steps=2)
    for held in run_threads(2, train, rows_task(lambda: make("stack")), case):
        assert not [key for key in held.lines if key.kind == "all_to_all"]
    if "bf16" not in plan:
        equals_one(run_threads, rows_task(lambda: make("stack")), case)


@pytest.mark.parametrize("plan", ["dp2 zero1", "pp2 gpipe:2", "tp2"])
def test_an_optimizer_that_combines_parameters_needs_all_of_them(plan: str):
    """A norm over the parameters of one rank is another one than over all; ddp has all."""
    with pytest.raises(InputError, match="its update of a parameter depends on the others"):
        sw.parallelize(
            make("stack"), plan, traced(0, 2), optimizer=sw.Optim(Clipped), loss=regression
        )


def test_ddp_steps_once_over_all_parameters():
    """So an optimizer of a program trains as it does alone, also where it combines them."""
    equals_one(
        run_threads, rows_task(lambda: make("stack")), Case("dp2 fp64", kind=Clipped, options={})
    )


def test_groups_may_have_another_class():
    """The first pattern that matches; a rate keeps its proportion to the others."""
    spec = sw.Muon({"*0*": sw.SGD(lr=0.5), "*": {"lr": 0.25}}, lr=0.125, rest=sw.AdamW(lr=0.75))
    engine = sw.parallelize(make("stack"), "fp64", alone(), optimizer=spec, loss=regression)
    engine.step(vectors(0))
    groups = engine.optimizer.param_groups
    assert [g["name"] for g in groups] == ["default", "*0*", "*", "rest"]
    assert [g["lr"] for g in groups] == [0.125, 0.5, 0.25, 0.75]
    assert all(p.ndim == 2 for p in groups[2]["params"]) and "momentum" not in groups[3]
    engine.set_lr(0.25)
    assert [g["lr"] for g in groups] == [0.25, 1.0, 0.5, 1.5]


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
    "a closure": (lambda: sw.Optim(torch.optim.LBFGS), "computes the loss several times"),
    "sparse": (
        lambda: sw.Optim(torch.optim.SparseAdam),
        "SparseAdam, which takes sparse gradients",
    ),
    "groups in groups": (
        lambda: sw.SGD({"*": sw.AdamW({"*.bias": {"lr": 0.1}})}, lr=0.1),
        "a specification without groups of its own",
    ),
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
