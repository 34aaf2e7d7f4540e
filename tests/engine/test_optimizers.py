"""Optimizers: every class on pieces of any dims and on every tier, Lion, Adafactor."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.comm.world import traced
from shardwise.core.errors import InputError
from shardwise.engine.optimizer.lion import Lion
from shardwise.models import gpt
from tests.engine.cases import (
    Case,
    Task,
    difference,
    oracle,
    ranks_of,
    rows_task,
    settled,
    small_gpt,
    text,
)
from tests.engine.tensors import assert_counted, equals_one, gpt_task, holds, train
from tests.engine.test_state import ADAFACTOR, LION, assembled, saved
from tests.engine.zoo import DECAY, Gated, dims, gated
from tests.pool import run_gloo, run_threads

TASK = Task()
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_elementwise_optimizer_works_on_pieces(optimizer: str):
    """Each class of torch.optim updates pieces (some of them empty) as it updates the whole."""
    kind, options = OPTIMIZERS[optimizer]
    # Rprop and amsgrad look at signs and maxima: what is equal to 1e-12 stays equal
    equals_one(run_threads, TASK, Case("dp2 zero1 fp64", kind=kind, options=options), 1e-8)


TIERS = [
    *(("optim@disk", name) for name in ("SGD", "SGD momentum", "Adam", "RMSprop", "NAdam")),
    *(("optim=0.4", name) for name in ("SGD fused", "Adam")),
]


@pytest.mark.cases(4)
@pytest.mark.parametrize(("what", "optimizer"), TIERS)
def test_every_tier_updates_by_any_elementwise_optimizer(what: str, optimizer: str):
    """Any number of states, which a step makes, on the tier of each unit."""
    kind, options = OPTIMIZERS[optimizer]
    holds(run_threads, TASK, Case(f"dp2 zero2 fp64 offload:{what}", kind=kind, options=options))


@pytest.mark.parametrize("words", ["", "offload:optim", "offload:optim@disk"])
def test_a_first_gradient_beside_momenta(words: str):
    """One call of torch's SGD has parameters that have a momentum, and some that have none yet."""
    task = rows_task(lambda: settled(Gated()), lambda step: gated(1 if step == 0 else 2))
    case = Case(f"dp2 zero2 fp64 {words}", units=2**20, **DECAY["SGD"])
    assert [g["side.weight"] is None for g in oracle(task, case).grads] == [True, False, False]
    equals_one(run_threads, task, case)


@pytest.mark.parametrize("plan", ["dp2 zero1", "dp2 zero3"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.ASGD])
def test_optimizers_over_pieces_of_all_dimensions(kind: Any, plan: str):
    """The engine's own: states take the shapes of pieces, some of them empty or without dims."""
    equals_one(run_threads, rows_task(dims), Case(plan, kind=kind, clip=1.0))


@pytest.mark.parametrize("plan", ["dp2 zero1", "dp2 zero3", "dp4 zero3"])
def test_a_checkpoint_has_the_state_of_every_parameter_once(plan: str):
    """Of a parameter without dimensions the rank that holds it writes the moments."""
    wanted, found = (
        assembled(run_threads(ranks_of(one), saved, rows_task(dims), Case(one), 2))
        for one in ("dp1", plan)
    )
    assert found.keys() == wanted.keys() and "optim/exp_avg/last.scale" in found
    for name, array in wanted.items():
        assert difference(torch.as_tensor(found[name]), torch.as_tensor(array)) <= 1e-9, name


def test_lion_is_the_papers():
    """Three steps of algorithm 2 of arXiv 2302.06675, written out for one element."""
    p, m, lr, decay, first, second = 0.5, 0.0, 0.1, 0.2, 0.9, 0.99
    weight = torch.tensor([p], dtype=torch.float64, requires_grad=True)
    optimizer = Lion([weight], lr=lr, betas=(first, second), weight_decay=decay)
    for g in (1.0, -0.5, -3.0):
        weight.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        mean = first * m + (1 - first) * g
        p -= lr * ((mean > 0) - (mean < 0) + decay * p)
        m = second * m + (1 - second) * g
        assert weight.item() == pytest.approx(p, rel=1e-12)
    assert p == pytest.approx(0.5 * 0.98**3 - 0.1 * 0.98**2 + 0.1 * 0.98 + 0.1)


#: Plans on which each rank updates blocks or parts, for Lion; those of whole parameters, for both.
PLANS = [
    *(
        (plan, LION)
        for plan in ("dp2", "dp2 zero1", "dp4 zero3", "dp2 tp2 zero1", "pp2 dp2 zero3 1f1b:2")
    ),
    *((plan, ADAFACTOR) for plan in ("dp2", "dp2 accumulate:2", "dp1 zero3", "pp2 dp2 gpipe:2")),
]


@pytest.mark.cases(4)
@pytest.mark.parametrize(("plan", "optimizer"), PLANS)
def test_lion_and_adafactor(plan: str, optimizer: dict[str, Any]):
    """Parity within 1e-10 on processes; bytes and memory, means of rows and columns too."""
    holds(run_gloo, gpt_task(rows=8), Case(f"{plan} fp64", clip=0.5, **optimizer))


@pytest.mark.parametrize(("plan", "optimizer"), [("dp2 zero3 bf16", LION), ("dp2 bf16", ADAFACTOR)])
def test_masters(plan: str, optimizer: dict[str, Any]):
    """In 16 bits the states are those of fp32 masters, as predicted."""
    assert_counted(run_threads(2, train, gpt_task(), Case(plan, **optimizer)))


@pytest.mark.parametrize("plan", ["dp2 zero1", "dp2 zero3", "tp2", "dp_replicate2 dp_shard2 zero2"])
def test_adafactor_over_parts_of_parameters_is_refused(plan: str):
    """By parallelize and by predict, before anything is changed, with two ways on."""
    model, world = small_gpt(), traced(0, ranks_of(plan))
    match = rf"Adafactor under the plan '{plan}'.*sw\.Lion\(lr=1e-4\) with '{plan}'"
    with pytest.raises(InputError, match=match):
        sw.parallelize(model, plan, world, optimizer=sw.Adafactor(), loss=gpt.loss)
    with pytest.raises(InputError, match=match):
        sw.predict(model, plan, text(0), optimizer=sw.Adafactor(), loss=gpt.loss)
    assert all(isinstance(p, Tensor) and p.dim() for p in model.parameters())
