"""`experts:independent`: each expert is a model of its own, and no byte passes between experts."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.independent import ranks_by_expert
from shardwise.core.plan import Plan
from shardwise.models.initial import fill
from shardwise.parallel.expert.hard import hashed
from shardwise.verify.command import verify
from tests.engine.cases import Case, Task, build, ranks_of, small_gpt, text
from tests.engine.tensors import (
    ADAMW,
    Held,
    assert_counted,
    assert_parity,
    assert_pieces,
    gpt_task,
    mine,
    pieces,
    train,
    whole_run,
)
from tests.pool import run_gloo

WORD = "experts:independent"


def assigned(expert: int, experts: int, step: int) -> dict[str, Tensor]:
    """The rows of the global batch whose first token is hashed to this expert."""
    whole = text(step, rows=29)
    own = hashed(whole["inputs"][:, 0], experts) == expert
    return {key: values[own] for key, values in whole.items()}


def small_expert(expert: int) -> nn.Module:
    """A GPT with initial weights of its own."""
    model = small_gpt()
    fill(model, seed=expert)
    return model


def task_of(expert: int, experts: int) -> Task:
    batch = partial(assigned, expert, experts)
    return replace(gpt_task(), make=partial(small_expert, expert), batch=batch)


def trained(world: World, plan: str) -> tuple[Held, int]:
    """Three steps on the share of this rank's expert, and the bytes that left the expert."""
    parsed = Plan.parse(plan)
    expert = parsed.coordinate(world.rank)["ep"]
    case, before = Case(f"{plan} fp64", clip=0.5, **ADAMW), world.ledger.sent_bytes()
    held = train(world, task_of(expert, parsed.ep), case)
    return held, world.ledger.sent_bytes() - before


@pytest.mark.parametrize(
    "words",
    [
        "dp2 ep2",
        "dp4 ep2 zero3",
        "dp4 ep2 zero1 accumulate:2",
        "dp4 ep4 zero2",
        "dp2 ep2 tp2 sp",
        "dp2 ep2 pp2 1f1b:2",
        "dp_replicate2 dp_shard2 ep2 zero3 recompute:full",
        "dp4 ep2 offload:optim zero1",
    ],
)
def test_experts_are_independent_models(words: str):
    """Each expert equals a model trained alone on its share, its norm, bytes and memory too."""
    plan = f"{words} {WORD}"
    found = run_gloo(ranks_of(plan), trained, plan)
    for expert, ranks in enumerate(ranks_by_expert(Plan.parse(plan))):
        held = [found[rank][0] for rank in ranks]
        alone = words.replace(f"ep{Plan.parse(plan).ep}", "")
        case = Case(f"{alone} fp64", clip=0.5, **ADAMW)
        assert_parity(held, whole_run(task_of(expert, Plan.parse(plan).ep), case), 1e-10)
        assert_counted(held)
        assert not any(key.axis == "ep" for one in held for key in one.lines)
    assert [sent for _, sent in found] == [0] * len(found)


def only_the_first(world: World, plan: str) -> list[float]:
    engine = build(world, gpt_task(), Case(plan))
    steps = 0 if engine.world.expert else 3
    return [engine.step(mine(engine, text(step))).loss for step in range(steps)]


def test_an_expert_waits_for_no_other():
    """An expert trains while the others take no step, so it receives nothing from them."""
    found = run_gloo(4, only_the_first, f"dp4 ep2 zero3 {WORD} fp64")
    expected = pytest.approx(whole_run(gpt_task(), Case("dp2 fp64")).losses, rel=1e-10)
    assert found[0] == found[2] == expected
    assert found[1] == found[3] == []


def saved(world: World, plan: str, folder: str) -> str:
    task = task_of(Plan.parse(plan).coordinate(world.rank)["ep"], 2)
    engine = build(world, task, Case(plan))
    for step in range(2):
        engine.step(mine(engine, task.batch(step)))
    return str(sw.save(engine, folder))


def continued(world: World, plan: str, folder: str, expert: int | None = None) -> Held:
    task = task_of(Plan.parse(plan).coordinate(world.rank)["ep"] if expert is None else expert, 2)
    engine, held = build(world, task, Case(plan)), Held()
    sw.load(engine, folder)
    held.losses.append(engine.step(mine(engine, task.batch(2))).loss)
    held.weights = pieces(engine.boxes(), "model/")
    return held


@pytest.mark.full
def test_checkpoints(tmp_path: Path):
    """Each expert has its own checkpoint, which any plan of one model or of all continues."""
    made = run_gloo(4, saved, f"dp4 ep2 zero3 {WORD} fp64", str(tmp_path))
    assert [Path(path).parent.name for path in made] == ["expert0", "expert1"] * 2
    together = run_gloo(2, continued, f"dp2 ep2 {WORD} fp64", str(tmp_path))
    second = run_gloo(2, continued, "dp2 zero1 fp64", str(tmp_path / "expert1"), 1)
    for expert, ranks in enumerate(([together[0]], [together[1]])):
        expected = whole_run(task_of(expert, 2), Case("dp1 fp64"))
        for held in (ranks, second) if expert else (ranks,):
            assert held[0].losses == pytest.approx(expected.losses[2:], rel=1e-10)
            assert_pieces([one.weights for one in held], expected.weights, 1e-10)


@pytest.mark.full
@pytest.mark.parametrize("plan", [f"dp4 ep2 {WORD}", f"dp2 ep2 {WORD}"])
def test_verify(plan: str):
    """`shardwise verify` proves each expert, and reports no byte between them."""
    found = verify(plan, "gpt", steps=2)
    assert found.holds
    assert {columns["ep, between experts"] for columns in found.sent.values()} == {0}


def test_prediction_of_an_expert():
    """A rank of an expert holds and sends what it would without the other experts."""
    whole, batch = gpt_task(), text(0, 4)
    one = sw.predict(whole.make(), "dp2 zero3 fp64", batch, rank=1, loss=whole.loss)
    of = sw.predict(whole.make(), f"dp4 ep2 zero3 fp64 {WORD}", batch, rank=3, loss=whole.loss)
    assert (of.memory, of.in_step(4)) == (one.memory, one.in_step(4))
