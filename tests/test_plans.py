"""Every plan of the table: parity, bytes, memory, leaks and checkpoints, from one run of each."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.plan import Plan
from shardwise.engine.engine import Engine
from shardwise.engine.meter import Leak, Meter
from shardwise.prediction.memory import by_tier
from shardwise.verify.loads import Choices
from shardwise.verify.oracles import is_asynchronous, oracles_of
from tests import covering
from tests.engine.cases import Case, Task, build, foreseen, ranks_of
from tests.engine.tensors import ADAMW, Piece, assert_pieces, mine, pieces, sent
from tests.engine.test_state import assembled, saved
from tests.models import TASKS, kind_of, task_of
from tests.plans import CANONICAL
from tests.pool import run_gloo, run_threads

STEPS = 3
TOLERANCE = 1e-10


@dataclass
class Trained:
    """One rank's training: values, and pairs of what was measured and predicted."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    gradients: list[list[Piece]] = field(default_factory=list)
    bytes: list[tuple[Any, Any]] = field(default_factory=list)
    memory: list[tuple[dict[str, int], dict[str, int]]] = field(default_factory=list)
    leaks: list[list[Leak]] = field(default_factory=list)
    evaluated: float = 0.0
    state: list[Piece] = field(default_factory=list)
    continued: float = 0.0  # the loss of the third step, after loading what one process saved


def case_of(text: str) -> Case:
    """The training of a plan: clipped where stages have a common norm."""
    plan = exact(text)
    clip = None if is_asynchronous(Plan.parse(plan).completed(None)) else 0.5
    return Case(plan, clip=clip, **ADAMW)


def exact(text: str) -> str:
    """The plan in fp64."""
    base, bar, layers = text.partition("|")
    return text if "fp64" in text else f"{base.strip()} fp64 {bar}{layers}".strip()


def train(world: World, text: str, loads: list[Any], arrays: Any, scalars: Any) -> Trained:
    """Three steps, an evaluation, and a step of another engine that loads a checkpoint."""
    task, case = task_of(text), case_of(text)
    engine, theory, found = build(world, task, case), foreseen(world, task, case), Trained()
    meter = Meter(engine)
    for step in range(STEPS):
        own = mine(engine, task.batch(step))
        with meter:
            metrics = engine.step(own)
        found.leaks.append(meter.leaks())
        found.losses.append(metrics.loss)
        found.norms.append(metrics.grad_norm)
        found.gradients.append(pieces(engine.gradients(), "grad/"))
        told = theory.of(own)
        found.bytes.append((sent(engine), told.in_step(step, loads=loads[step])))
        held = by_tier(engine.memory(), engine.host_memory(), engine.disk_memory())
        found.memory.append((held, told.memory_by_tier))
    found.state = pieces(engine.boxes(), "")
    found.evaluated, _ = engine.evaluate(mine(engine, task.batch(STEPS)))
    if arrays is not None:
        found.continued = continued(build(world, task, case), task, arrays, scalars)
    return found


def continued(engine: Engine, task: Task, arrays: Any, scalars: Any) -> float:
    """The loss of the third step of an engine that loads what another saved after two."""
    tensors = {name: (a.shape, torch.from_numpy(a).dtype) for name, a in arrays.items()}
    for box in engine.loading(tensors, scalars):
        at = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        box.tensor.detach().copy_(torch.from_numpy(np.array(arrays[box.name][at])))
    engine.load_scalars(scalars)
    engine.loaded()
    return engine.step(mine(engine, task.batch(2))).loss


@dataclass
class Expected:
    """The same in one process, in plain PyTorch (verify/oracle.py)."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    loads: list[Any] = field(default_factory=list)
    evaluated: float = 0.0


def expected(text: str) -> Expected:
    """The oracle's training under the plan's case."""
    task, case, plan = task_of(text), case_of(text), Plan.parse(exact(text)).completed(None)
    recipe = sw.Optim(case.kind, **case.options)
    oracle = oracles_of(task.make, plan, recipe, task.loss, task.tokens).exact
    found, choices = Expected(), Choices(oracle.model)
    for step in range(STEPS):
        batch = task.batch(step)
        found.losses.append(oracle.step(batch, case.clip))
        found.loads.append(choices.loads(batch, plan))
        found.gradients.append({n: g.clone() for n, g in oracle.weights.used.items()})
    found.state = {f"model/{n}": t.clone() for n, t in oracle.weights.values().items()}
    found.state |= {f"optim/{n}": t.clone() for n, t in oracle.weights.state().items()}
    last = task.batch(STEPS)
    found.evaluated = float(oracle.evaluate(lambda m: oracle.task.loss_of(m, last, oracle.dtype)))
    return found


@cache
def checkpoint(kind: str) -> Any:
    """What one process saved after two steps of a kind of model."""
    states = [saved(alone(), TASKS[kind], case_of("fp64"), 2)]
    return assembled(states), states[0][1]


@dataclass(frozen=True)
class Run:
    """A plan's run on all ranks, and the same in one process."""

    plan: str
    ranks: list[Trained]
    expected: Expected


PLANS = [
    *(pytest.param((run_gloo, plan), id=plan) for rows in CANONICAL.values() for plan in rows),
    *(pytest.param((run_threads, plan), id=plan) for plan in covering.read()),
]


@pytest.fixture(scope="module", params=PLANS)
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """The run of one plan, which the facts below are about."""
    on_ranks, plan = request.param
    wanted = expected(plan)
    arrays, scalars = checkpoint(kind_of(plan))
    ranks = on_ranks(ranks_of(exact(plan)), train, plan, wanted.loads, arrays, scalars)
    yield Run(plan, ranks, wanted)


def near(values: list[float]) -> Any:
    return pytest.approx(values, rel=TOLERANCE)


def test_parity(run: Run):
    """Losses, gradients, weights and states are those of one process, 1e-10 in fp64."""
    for rank in run.ranks:
        assert rank.losses == near(run.expected.losses)
        assert rank.evaluated == pytest.approx(run.expected.evaluated, rel=TOLERANCE)
    if not is_asynchronous(Plan.parse(run.plan)):
        for step, wanted in enumerate(run.expected.gradients):
            assert_pieces([rank.gradients[step] for rank in run.ranks], wanted, TOLERANCE)
    for kind in ("model/", "optim/"):
        wholes = {n: t for n, t in run.expected.state.items() if n.startswith(kind)}
        parts = [[p for p in rank.state if p.name in wholes] for rank in run.ranks]
        assert_pieces(parts, wholes, TOLERANCE)


def test_bytes(run: Run):
    """Every line of the ledger, of each step, is what was predicted from the plain model."""
    for rank in run.ranks:
        for measured, predicted in rank.bytes:
            assert measured == predicted


def test_memory(run: Run):
    """Bytes of every category on every tier are what was predicted."""
    for rank in run.ranks:
        for measured, predicted in rank.memory:
            assert measured == predicted


def test_nothing_is_left(run: Run):
    """From the second step on no storage outlives its step."""
    for rank in run.ranks:
        first, *later = rank.leaks
        assert {leak.place.category for leak in first} <= {"gradients", "optimizer"}
        assert later == [[]] * (STEPS - 1)


def test_a_checkpoint_of_one_process_goes_on(run: Run):
    """What one process saved after two steps continues under the plan: the third step's loss."""
    for rank in run.ranks:
        assert rank.continued == pytest.approx(run.expected.losses[2], rel=TOLERANCE)
