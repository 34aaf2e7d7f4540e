"""torch's learning rate schedulers on `engine.optimizer`, beside the same ones in a plain loop."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from tests.engine.cases import regression, share, vectors
from tests.engine.zoo import make
from tests.pool import run_gloo, run_threads

STEPS = 5
GROUPS = {"*.bias": {"lr": 0.02, "weight_decay": 0.0}}

#: Name: the scheduler, made on an optimizer with two groups.
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 1 / (n + 1), lambda n: 0.5**n]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9**n),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.1),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, 2, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def advance(scheduler: Any, loss: float) -> None:
    """One step of the scheduler; one of them looks at the loss."""
    plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    scheduler.step(loss) if plateau else scheduler.step()


def engine_of(world: World, plan: str, **options: Any) -> sw.Engine:
    recipe = sw.AdamW(**{"lr": 0.01, "groups": GROUPS} | options)
    return sw.parallelize(make("stack"), plan, world, optimizer=recipe, loss=regression, clip=1.0)


def scheduled(world: World, plan: str, name: str) -> list[tuple[float, list[float]]]:
    """Loss and the rates of both groups, step by step."""
    engine, found = engine_of(world, plan), []
    scheduler = SCHEDULERS[name](engine.optimizer)
    for step in range(STEPS):
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        loss = engine.step(share(vectors(step, 8), engine.data_rank, engine.data_ranks)).loss
        advance(scheduler, loss)
        found.append((loss, rates))
    return found


def plain(name: str) -> list[tuple[float, list[float]]]:
    """The same in one process and plain PyTorch."""
    model, found = make("stack").double(), []
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    biases = {"params": [p for n, p in named if n.endswith("bias")], **GROUPS["*.bias"]}
    others = {"params": [p for n, p in named if not n.endswith("bias")]}
    optimizer = torch.optim.AdamW([others, biases], lr=0.01)
    scheduler = SCHEDULERS[name](optimizer)
    for step in range(STEPS):
        rates = [group["lr"] for group in optimizer.param_groups]
        optimizer.zero_grad()
        loss = regression(model, vectors(step, 8))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        advance(scheduler, loss.item())
        found.append((loss.item(), rates))
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_torch_drives_the_engine(name: str):
    """Rates of every group and losses are those of the plain loop; no scheduler warns."""
    wanted = plain(name)
    for found in run_threads(2, scheduled, "dp2 zero3 fp64", name):
        assert [rates for _, rates in found] == [rates for _, rates in wanted]
        losses = [loss for loss, _ in wanted]
        assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-10)
    assert len({tuple(rates) for _, rates in wanted}) > 1


def test_a_pipeline_has_the_same_groups_on_every_rank():
    """A stage without any parameter of a group has that group, empty, so that schedules agree."""
    wanted = plain("LambdaLR")
    for found in run_gloo(2, scheduled, "pp2 1f1b:2 fp64", "LambdaLR"):
        assert [rates for _, rates in found] == [rates for _, rates in wanted]
        losses = [loss for loss, _ in wanted]
        assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-10)


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
    engine.step(share(vectors(0, 8), 0, 1))
    optimizer.zero_grad()
    with pytest.raises(InputError, match=r"engine\.step\(batch\), then scheduler\.step"):
        optimizer.step()
    with pytest.raises(InputError, match="groups="):
        optimizer.add_param_group({"params": [torch.zeros(1)]})


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


def resumed(world: World, folder: str, name: str, plan: str, then: str) -> list[list[float]]:
    """The rates of five steps, of which the last two come after a checkpoint and another plan."""
    rates: list[list[float]] = []

    def train(engine: sw.Engine, scheduler: Any, steps: range) -> None:
        for step in steps:
            rates.append([group["lr"] for group in engine.optimizer.param_groups])
            engine.step(share(vectors(step, 8), engine.data_rank, engine.data_ranks))
            scheduler.step()

    engine = engine_of(world, plan)
    scheduler = SCHEDULERS[name](engine.optimizer)
    train(engine, scheduler, range(3))
    sw.save(engine, folder, {"scheduler": scheduler.state_dict()})
    engine = engine_of(world, then)
    scheduler = SCHEDULERS[name](engine.optimizer)
    scheduler.load_state_dict(sw.load(engine, folder)["scheduler"])
    train(engine, scheduler, range(3, 5))
    return rates


@pytest.mark.parametrize("name", ["ExponentialLR", "OneCycleLR", "CosineAnnealingLR"])
def test_a_schedule_goes_on_after_a_load(tmp_path, name: str):
    """`sw.save` keeps the rates that a scheduler has set, `sw.load` sets them again."""
    wanted = [rates for _, rates in plain(name)]
    for found in run_gloo(2, resumed, str(tmp_path), name, "zero1 fp64", "pp2 1f1b:2 fp64"):
        assert found == wanted


def test_a_new_rate_in_the_recipe_is_the_one_that_counts(tmp_path):
    """A rate that the program changes between save and load is not overwritten; others are kept."""
    engine = engine_of(alone(), "fp64")
    engine.set_lr(0.005)
    engine.step(vectors(0, 8))
    sw.save(engine, tmp_path)
    same, other = engine_of(alone(), "fp64"), engine_of(alone(), "fp64", lr=0.5)
    sw.load(same, tmp_path)
    assert [group["lr"] for group in same.optimizer.param_groups] == [0.005, 0.01]
    sw.load(other, tmp_path)
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.5, 0.01]


def test_a_pattern_that_matches_nothing_warns_once():
    """One recipe serves two models: rank 0 warns, and training goes on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(2, with_pattern, "*.bais")
    [warning] = caught
    assert 'group "*.bais" matches no parameter' in str(warning.message)


def with_pattern(world: World, pattern: str) -> None:
    engine = engine_of(world, "dp2 fp64", groups={pattern: {"lr": 0.5}})
    engine.step(share(vectors(0, 8), engine.data_rank, engine.data_ranks))


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), "0.1", None])
def test_a_rate_that_is_not_finite_is_refused_before_the_update(lr: Any):
    """A scheduler may give one: the weights stay, and the next step trains."""
    engine = engine_of(alone(), "zero1 fp64")
    before = weights(engine.model)
    engine.optimizer.param_groups[1]["lr"] = lr
    with pytest.raises(InputError, match=r"a learning rate of .*'\*\.bias'.* a finite number"):
        engine.step(vectors(0, 8))
    assert all(map(torch.equal, weights(engine.model), before))
    engine.set_lr(0.01)
    assert not engine.step(vectors(0, 8)).skipped
