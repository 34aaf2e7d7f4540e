"""Optimizers: every class on pieces of any dims and on every tier; those of whole tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.comm.world import World, alone, traced
from shardwise.core.errors import InputError, RankError
from shardwise.core.tally import Key
from shardwise.engine.optimizer.elementwise import Lion
from shardwise.models import gpt
from tests.engine.cases import (
    Case,
    Task,
    build,
    difference,
    oracle,
    ranks_of,
    rows_task,
    settled,
    share,
    small_gpt,
    squares,
    text,
)
from tests.engine.loops import rows
from tests.engine.tensors import assert_counted, equals_one, gpt_task, holds, mine, run, train
from tests.engine.test_state import ADAFACTOR, LION, MUON
from tests.engine.zoo import DECAY, Gated, dims, gated, make
from tests.pool import run_threads

TASK, DIMS, STACK = Task(), rows_task(dims), rows_task(lambda: make("stack"))
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD dampening": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "fused": True},
    ),
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
    """Each of torch.optim updates pieces of any dims as the whole; what it keeps is predicted."""
    kind, options = OPTIMIZERS[optimizer]
    # Rprop and amsgrad look at signs and maxima: what is equal to 1e-12 stays equal
    holds(run_threads, DIMS, Case("dp2 zero3 fp64", kind=kind, options=options, clip=1.0), 1e-8)


TIERS = [
    *(("optim@disk", name) for name in ("SGD", "SGD momentum", "Adam", "RMSprop", "NAdam")),
    *(("optim", name) for name in ("SGD fused", "Adam")),
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


RESETS: dict[str, Any] = {
    "cleared": lambda optim, _: optim.state.clear(),
    "read": lambda optim, p: optim.state[p]["step"].item(),
    "dropped": lambda optim, p: optim.state.pop(p),
    "replaced": lambda optim, p: optim.state[p].update(step=torch.ones(())),
    "dampened": lambda optim, _: optim.param_groups[0].update(momentum=0.9, dampening=0.5),
}


def reset(world: World, how: str) -> dict[str, Tensor]:
    """The weights of an engine whose optimizer the program changes; in plain torch on one rank."""
    model, alone = settled(nn.Linear(6, 6)).double(), world.size == 1
    kind = torch.optim.SGD if how == "dampened" else torch.optim.AdamW
    plan, options = "dp2 zero1 fp64", {"optimizer": sw.Optim(kind, lr=0.1), "loss": squares}
    optim = kind(model.parameters(), lr=0.1)
    engine = None if alone else sw.parallelize(model, plan, world, **options)
    for step in range(4):
        if step == 2:
            RESETS[how](optim if engine is None else engine.optimizer, model.weight)
        if engine is None:
            squares(model, torch.cat([rows(step, rank) for rank in range(2)])).backward()
            optim.step()
            optim.zero_grad()
        else:
            engine.step(rows(step, world.rank))
    return dict(model.state_dict() if engine is None else sw.full_state_dict(engine))


@pytest.mark.parametrize("how", RESETS)
def test_what_a_program_changes_in_the_optimizer_holds_in_the_next_step(how: str):
    """Also states of several parameters that were updated as one, and a momentum that begins."""
    ours, (expected,) = run_threads(2, reset, how)[0], run_threads(1, reset, how)
    assert all(difference(ours[name], expected[name]) < 1e-12 for name in expected)


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


# --- classes of a program -------------------------------------------------------------------------


class Elementwise(Optimizer):
    """A class that updates each element alone; `calls` counts its steps."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "calls": 0, "twice": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad.sign(), alpha=group["lr"] * (1 + group["twice"]) / group["calls"])


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


class Lamb(Optimizer):
    """A class that needs whole tensors, with a count of its calls in its groups."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                mean = self.state[p]["mean"]
                ratio = p.norm() / mean.norm().clamp(min=1e-6)
                p.sub_(mean * ratio, alpha=group["lr"] / group["calls"])


def fsdp(world: World, of: Any, after: bool, said: bool) -> str:
    """The weights after a first step in a plain loop, or the error. The optimizer is made before
    the wrapping, or after it.
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


def test_pieces_are_only_for_what_is_known_to_update_elements():
    """Before the wrapping or after it: a class for matrices would compute something else."""
    for after in (False, True):
        for said in run_threads(2, fsdp, Elementwise, after, False):
            assert "a step of Elementwise on shards" in said
            assert "optim.elementwise = True" in said
        for said in run_threads(2, fsdp, torch.optim.Muon, after, False):
            assert "a step of Muon with a closure on shards" in said
    for good in (Elementwise, torch.optim.AdamW):
        before, after = (run_threads(2, fsdp, good, late, True) for late in (False, True))
        assert before == after and "tensor" in before[0]


LOOKUPS = torch.tensor([[[0, 1, 3], [2, 2, 3]], [[5, 1, 3], [5, 2, 9]], [[7, 1, 3], [0, 0, 0]]])


def looked_up(world: World, wrap: Any = sw.DDP) -> Tensor:
    """A table after steps of SparseAdam; rows with a gradient of zero have a step of their own."""
    table = nn.Embedding(10, 4, padding_idx=3, sparse=True, dtype=torch.float64)
    head = nn.Linear(4, 1, dtype=torch.float64)
    model = settled(nn.Sequential(table, head, nn.ReLU()))
    model = wrap(model, world=world) if wrap else model
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
    """Under sw.DDP, as in one process; pieces of a table are refused."""
    wanted = looked_up(alone(), wrap=None)
    for found in run_threads(2, looked_up):
        assert difference(found, wanted) <= 1e-10
    with pytest.raises(RankError, match="a step of SparseAdam on shards"):
        run_threads(2, looked_up, sw.FSDP)


@pytest.mark.parametrize("plan", ["dp2 zero2 bf16", "dp2 zero3 fp64", "dp2 offload:optim fp64"])
def test_an_engine_calls_such_a_class_once_in_a_step(plan: str):
    """Whatever the number of units; its pieces are sent to no owner."""
    case = Case(plan, kind=Elementwise, options={"elementwise": True}, steps=2)
    for held in run_threads(2, run, STACK, case):
        assert not [key for key in held.lines if key.kind == "all_to_all"]
    if "bf16" not in plan:
        equals_one(run_threads, STACK, case)


def test_a_class_has_groups_with_keys_of_its_own():
    """What it understands in a group is its affair; ddp steps once over all parameters."""
    spec = sw.Optim(Elementwise, elementwise=True, lr=0.25, groups={"*.bias": {"twice": True}})
    model = make("stack")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = sw.parallelize(model, "fp64", alone(), optimizer=spec, loss=STACK.loss)
    engine.step(STACK.batch(0))
    for name, p in model.named_parameters():
        moved = (p - before[name]).abs().max().item()
        assert moved == pytest.approx(0.5 if name.endswith("bias") else 0.25)
    equals_one(run_threads, STACK, Case("dp2 fp64", kind=Clipped, options={}))


LAMB: dict[str, Any] = {"kind": Lamb, "options": {}}
#: An optimizer of whole tensors beside one of pieces, one whose states are means, one of a program.
WHOLE = [MUON, ADAFACTOR, LAMB]
PLANS = [
    *((plan, LION) for plan in ("dp2", "dp2 zero1", "dp2 tp2 zero1", "pp2 dp2 zero3 1f1b:2")),
    *((f"dp2 {row}", which) for row in ("ddp", "zero1", "zero2", "zero3") for which in WHOLE),
    *((plan, MUON) for plan in ("dp1 zero3", "dp4 zero1 accumulate:2", "pp2 gpipe:2")),
    *((plan, ADAFACTOR) for plan in ("pp2 dp2 zero3 1f1b:2", "dp2 row:R,R,S")),
    *((plan, LAMB) for plan in ("dp_replicate2 dp_shard2 zero2", "dp2 offload:optim")),
]


@pytest.mark.cases(4)
@pytest.mark.parametrize(("plan", "optimizer"), PLANS)
def test_lion_and_optimizers_of_whole_tensors(plan: str, optimizer: dict[str, Any]):
    """Parity within 1e-10; bytes to and from owners, and their states, are as predicted."""
    holds(run_threads, gpt_task(rows=8), Case(f"{plan} fp64", clip=0.5, **optimizer))


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [("dp2 zero3 bf16", LION), ("dp2 bf16", ADAFACTOR), ("dp2 zero1 bf16", MUON)],
)
def test_masters(plan: str, optimizer: dict[str, Any]):
    """In 16 bits the states are those of fp32 masters, as predicted."""
    assert_counted(run_threads(2, train, gpt_task(), Case(plan, **optimizer)))


def test_owners_have_equally_much():
    """The formula of the page: N (n-1)/n^2 elements of gradient, and of weight there and back."""
    ranks = run_threads(4, run, gpt_task(), Case("dp4 zero2 fp64", kind=Lamb, options={}))
    sent = [held.lines[Key("dp", "all_to_all", "update")].elements for held in ranks]
    numel = sum(p.numel() for p in gpt_task().make().parameters())
    assert sum(sent) == pytest.approx(3 * numel * 3 / 4, rel=0.1)
    assert max(sent) <= 1.3 * min(sent)


CLIPPED = "its update of a parameter depends on the others"
REFUSED = [
    *((plan, {"kind": Clipped}, CLIPPED) for plan in ("dp2 zero1", "pp2 gpipe:2", "tp2")),
    ("tp2", MUON, r"Muon for embed.weight, of which each rank of the axis tp has a part"),
    ("dp2 zero3 tile:2", LAMB, "each rank of the axis tile has a part"),
    ("dp2 zero1 offload:optim", MUON, r"Muon with offload:optim .*it needs whole tensors"),
    ("dp2 offload:optim@disk", LAMB, "Lamb with offload:optim@disk: the update is made on a disk"),
    ("dp2 offload:optim-delayed", LAMB, "the update is made beside the next step"),
    ("dp1", {"kind": torch.optim.Muon}, r"Muon for .*norm.*rest=sw\.AdamW\(lr=3e-4\)"),
]


@pytest.mark.parametrize(("plan", "optimizer", "match"), REFUSED)
def test_where_whole_tensors_are_refused(plan: str, optimizer: dict[str, Any], match: str):
    """By parallelize and by predict, with what to write."""
    model, world, kind = small_gpt(), traced(0, ranks_of(plan)), optimizer["kind"]
    spec = sw.Optim(kind, **optimizer.get("options", {}))
    with pytest.raises(InputError, match=match):
        sw.parallelize(model, plan, world, optimizer=spec, loss=gpt.loss)
    with pytest.raises(InputError, match=match):
        sw.predict(small_gpt(), plan, text(0), optimizer=spec, loss=gpt.loss)


# --- schedule-free ------------------------------------------------------------------------------


class TwoSets(Optimizer):
    """SGD of weights that are twice as large in training as in evaluations."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "training": False})

    @torch.no_grad()
    def _switch(self, training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["training"] is not training else ():
                p.mul_(2.0 if training else 0.5)
            group["training"] = training

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["training"]
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"])


def schedule_free(world: World, plan: str, folder: str, elementwise: bool) -> list[float]:
    """Losses of steps and evaluations; two engines, of which the second loads what one saved."""
    task, found = gpt_task(rows=8), []
    options = {"elementwise": elementwise}
    for first in (0, 2):
        engine = build(world, task, Case(plan, kind=TwoSets, options=options))
        if first:
            sw.load(engine, folder)
        for step in range(first, first + 2):
            engine.optimizer.train()
            found.append(engine.step(mine(engine, task.batch(step))).loss)
        sw.save(engine, folder)
        engine.optimizer.eval()
        found.append(engine.evaluate(mine(engine, task.batch(9)))[0])
    return found


FREE = [("dp2 zero1", True), ("dp2 zero3", False), ("pp2 gpipe:2", True), ("dp2 bf16", False)]


@pytest.mark.parametrize(("plan", "elementwise"), FREE)
def test_schedule_free(plan: str, elementwise: bool, tmp_path: Path):
    """Weights are switched for an evaluation; a checkpoint keeps the ones that it has seen."""
    task, wanted = gpt_task(rows=8), []
    model = task.make().double()
    optimizer = TwoSets(model.parameters())
    for step in range(4):
        optimizer.train()
        loss = task.loss(model, task.batch(step))
        model.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
        if step % 2:
            optimizer.eval()
            wanted.append(task.loss(model, task.batch(9)).item())
    precision = "" if "bf16" in plan else " fp64"
    given = plan + precision, str(tmp_path), elementwise
    for found in run_threads(ranks_of(plan), schedule_free, *given):
        assert found == pytest.approx(wanted, rel=1e-10 if precision else 0.02)
