"""Recipes, their groups, and torch's learning rate schedulers and hooks on `engine.optimizer`."""

import copy
import math
import warnings
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from tests.engine.cases import Case, build, regression, share, vectors
from tests.engine.tensors import gpt_task, mine
from tests.engine.zoo import make
from tests.pool import run_gloo, run_threads

STEPS = 5
GROUPS = {"*.bias": {"lr": 0.02, "weight_decay": 0.0}}

#: Name: the scheduler, made on an optimizer with two groups.
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 1 / (n + 1), lambda n: 0.5**n]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, 2, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


def advance(scheduler: Any, loss: float) -> None:
    """One step of the scheduler; one of them looks at the loss."""
    plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    scheduler.step(loss) if plateau else scheduler.step()


def engine_of(world: World, plan: str, **options: Any) -> sw.Engine:
    recipe = sw.AdamW(**{"lr": 0.01, "groups": GROUPS} | options)
    return sw.parallelize(make("stack"), plan, world, optimizer=recipe, loss=regression, clip=1.0)


def rates(engine: sw.Engine) -> list[float]:
    return [group["lr"] for group in engine.optimizer.param_groups]


def step_of(engine: sw.Engine, step: int) -> float:
    return engine.step(share(vectors(step, 8), engine.data_rank, engine.data_ranks)).loss


def scheduled(world: World, plan: str, name: str) -> list[tuple[float, list[float]]]:
    engine, found = engine_of(world, plan), []
    scheduler = SCHEDULERS[name](engine.optimizer)
    for step in range(STEPS):
        used = rates(engine)
        loss = step_of(engine, step)
        advance(scheduler, loss)
        found.append((loss, used))
    return found


def plain(name: str) -> list[tuple[float, list[float]]]:
    model, found = make("stack").double(), []
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    biases = {"params": [p for n, p in named if n.endswith("bias")], **GROUPS["*.bias"]}
    others = {"params": [p for n, p in named if not n.endswith("bias")]}
    optimizer = torch.optim.AdamW([others, biases], lr=0.01)
    scheduler = SCHEDULERS[name](optimizer)
    for step in range(STEPS):
        used = [group["lr"] for group in optimizer.param_groups]
        optimizer.zero_grad()
        loss = regression(model, vectors(step, 8))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        advance(scheduler, loss.item())
        found.append((loss.item(), used))
    return found


@pytest.mark.parametrize(
    ("plan", "name"),
    [("pp2 1f1b:2 fp64", "LambdaLR"), *(("dp2 zero3 fp64", name) for name in SCHEDULERS)],
)
def test_a_scheduler_of_torch_drives_the_engine(plan: str, name: str):
    """Rates of every group and losses are those of the plain loop; no scheduler warns. A stage
    without any parameter of a group has that group, empty, so that schedules agree.
    """
    wanted = plain(name)
    for found in run_threads(2, scheduled, plan, name):
        assert [used for _, used in found] == [used for _, used in wanted]
        losses = [loss for loss, _ in wanted]
        assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-10)
    assert len({tuple(used) for _, used in wanted}) > 1


def test_engine_optimizer_is_an_optimizer_of_torch():
    """Groups in the recipe's order with their names, the default first; and it is no plain one."""
    with pytest.warns(UserWarning, match=r'group "none\.\*" matches no parameter'):
        engine = engine_of(alone(), "bf16", groups={"*.weight": {}, "none.*": {}})
    optimizer = engine.optimizer
    assert isinstance(optimizer, Optimizer)
    names = [(group["name"], group["param_names"]) for group in optimizer.param_groups]
    model = [name for name, p in engine.model.named_parameters() if p.requires_grad]
    assert names == [
        ("default", [name for name in model if not name.endswith("weight")]),
        ("*.weight", [name for name in model if name.endswith("weight")]),
        ("none.*", []),
    ]
    step_of(engine, 0)
    optimizer.zero_grad()


def test_groups_may_have_another_class():
    """The first pattern that matches; a rate keeps its proportion to the others."""
    spec = sw.Muon({"*0*": sw.SGD(lr=0.5), "*": {"lr": 0.25}}, lr=0.125, rest=sw.AdamW(lr=0.75))
    engine = sw.parallelize(make("stack"), "fp64", alone(), optimizer=spec, loss=regression)
    engine.step(vectors(0))
    groups = engine.optimizer.param_groups
    assert [g["name"] for g in groups] == ["default", "*0*", "*", "rest"]
    assert rates(engine) == [0.125, 0.5, 0.25, 0.75]
    assert all(p.ndim == 2 for p in groups[2]["params"]) and "momentum" not in groups[3]
    engine.set_lr(0.25)
    assert rates(engine) == [0.25, 1.0, 0.5, 1.5]


def test_state_dict_has_the_options_and_no_tensors():
    """It goes through JSON-like copying into another engine; other groups are refused."""
    one, two = engine_of(alone(), "fp64"), engine_of(alone(), "fp64")
    lr_scheduler.OneCycleLR(one.optimizer, 0.1, total_steps=8)
    saved = copy.deepcopy(one.optimizer.state_dict())
    assert [group["name"] for group in saved["param_groups"]] == ["default", "*.bias"]
    assert saved["state"] == {}
    two.optimizer.load_state_dict(saved)
    assert two.optimizer.state_dict() == saved
    assert two.optimizer.param_groups[0]["betas"] == one.optimizer.param_groups[0]["betas"]
    other = engine_of(alone(), "fp64", groups={})
    with pytest.raises(InputError, match=r"with the groups \['default', '\*\.bias'\]"):
        other.optimizer.load_state_dict(saved)


def resumed(world: World, folder: str, name: str) -> list[list[float]]:
    """The rates of five steps, of which the last two come after a checkpoint and another plan."""
    found: list[list[float]] = []

    def train(engine: sw.Engine, scheduler: Any, steps: range) -> None:
        for step in steps:
            found.append(rates(engine))
            step_of(engine, step)
            scheduler.step()

    engine = engine_of(world, "zero1 fp64")
    scheduler = SCHEDULERS[name](engine.optimizer)
    train(engine, scheduler, range(3))
    sw.save(engine, folder, {"scheduler": scheduler.state_dict()})
    engine = engine_of(world, "pp2 1f1b:2 fp64")
    scheduler = SCHEDULERS[name](engine.optimizer)
    scheduler.load_state_dict(sw.load(engine, folder)["scheduler"])
    train(engine, scheduler, range(3, 5))
    return found


@pytest.mark.parametrize("name", ["OneCycleLR", "CosineAnnealingLR", "ConstantLR"])
def test_a_schedule_goes_on_after_a_load(tmp_path, name: str):
    """`sw.load` sets the rates of the save again, over those of a scheduler made in between."""
    wanted = [used for _, used in plain(name)]
    for found in run_gloo(2, resumed, str(tmp_path), name):
        assert found == wanted


def test_a_new_rate_in_the_recipe_is_the_one_that_counts(tmp_path):
    """A rate that the program changes between save and load is not overwritten; others are kept."""
    engine = engine_of(alone(), "fp64")
    engine.set_lr(0.005)
    step_of(engine, 0)
    sw.save(engine, tmp_path)
    same, other = engine_of(alone(), "fp64"), engine_of(alone(), "fp64", lr=0.5)
    sw.load(same, tmp_path)
    assert rates(same) == [0.005, 0.01]
    sw.load(other, tmp_path)
    assert rates(other) == [0.5, 0.01]


def test_a_rate_that_is_a_tensor_trains_as_the_number():
    """Through the step, a new rate and the state that a checkpoint needs."""
    runs = []
    for rate in (0.125, torch.tensor(0.125)):
        engine = engine_of(alone(), "fp64", lr=rate, groups={})
        first = step_of(engine, 0)
        engine.set_lr(0.0625)
        runs.append((first, step_of(engine, 1), [*engine.model.parameters()]))
    (one, two, weights), (first, second, others) = runs
    assert (one, two) == (first, second)
    assert all(map(torch.equal, weights, others))


def test_a_pattern_that_matches_nothing_warns_once():
    """One recipe serves two models: rank 0 warns, and training goes on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(2, with_pattern, "*.bais")
    [warning] = caught
    assert 'group "*.bais" matches no parameter' in str(warning.message)


def with_pattern(world: World, pattern: str) -> None:
    step_of(engine_of(world, "dp2 fp64", groups={pattern: {"lr": 0.5}}), 0)


RATES = [math.nan, math.inf, "0.1", None, -0.1, True, torch.ones(2)]
OTHERS = [
    ("weight_decay", "a"),
    ("maximize", "x"),
    ("betas", (0.9,)),
    ("betas", (None, 0.9)),
    ("eps", math.nan),
]


@pytest.mark.parametrize(("option", "value"), [*(("lr", lr) for lr in RATES), *OTHERS])
def test_an_option_of_another_kind_is_refused_before_the_update(option: str, value: Any):
    """A scheduler may give one: the weights stay, and the next step trains."""
    engine = engine_of(alone(), "zero1 fp64")
    before = [p.detach().clone() for p in engine.model.parameters()]
    group = engine.optimizer.param_groups[1]
    first, group[option] = group[option], value
    with pytest.raises(InputError, match=r"'\*\.bias' of engine\.optimizer.* (number|first)"):
        step_of(engine, 0)
    if option == "lr":
        with pytest.raises(InputError, match=r"a learning rate of .* in engine\.set_lr"):
            engine.set_lr(value)
    assert all(map(torch.equal, engine.model.parameters(), before))
    group[option] = first
    step_of(engine, 0)


@pytest.mark.parametrize("fused", [True, False])
def test_step_hooks_of_a_skipped_update(fused: bool):
    """As under torch.amp, they run where the device skips it, which the host does not wait for."""
    engine, found = engine_of(alone(), "bf16", fused=fused), list[str]()
    engine.guard.skip = True
    engine.optimizer.register_step_post_hook(lambda *_: found.append("after"))
    assert engine.step(tuple(x * math.inf for x in vectors(0, 8))).skipped
    assert found == ["after"] * fused


def hooked(world: World, plan: str) -> list[str]:
    """What happens in two steps: hooks of the program, and steps of torch's optimizer."""
    engine, found = build(world, task := gpt_task(rows=8), Case(plan)), list[str]()
    engine.optimizer.register_step_pre_hook(lambda *_: found.append("before"))
    engine.optimizer.register_step_post_hook(lambda *_: found.append("after"))
    engine.optimizer.torch.register_step_pre_hook(lambda *_: found.append("update"))
    for step in range(2):
        engine.step(mine(engine, task.batch(step)))
    return found


@pytest.mark.parametrize("plan", ["dp2 zero1 bf16", "dp2 offload:optim", "pp2 pipedream:2"])
def test_step_hooks_of_the_program_run_around_each_update(plan: str):
    """Once a step, however many calls it takes; under PipeDream around each update of a stage."""
    for found in run_threads(2, hooked, plan):
        assert [word for word, _ in groupby(found)] == ["before", "update", "after"] * (
            4 if "pipedream" in plan else 2
        )
