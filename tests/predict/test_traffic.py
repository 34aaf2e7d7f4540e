"""The bytes a step sends are those of the table, to the byte."""

from typing import Any

import pytest

from shardwise.comm.world import World, traced
from shardwise.core import moves
from shardwise.core.model_spec import ModelShape, ParamShape, UnitShape
from shardwise.core.plan import Plan
from shardwise.core.zero import ROWS, step_moves
from shardwise.prediction.traffic import Line, by_kind, start_bytes, step_bytes
from tests.pool import run_threads
from tests.predict.model import batch, engine, foreseen

PLANS = [
    *("dp2", "dp2 zero1", "dp2 zero3", "dp2 zero2 accumulate:2", "dp1 zero3"),
    "dp_replicate2 dp_shard2 zero2 accumulate:2",
]


def lines(tally: Any) -> dict[Line, int]:
    return {Line(*key): t.sent_bytes for key, t in tally.items() if t.sent_bytes}


def differing(world: World, plan: str, kind: str, clip: float | None) -> list[Any]:
    """What one rank sent and what was predicted, where they are not the same."""
    ours = engine(world, plan, kind, clip=clip)
    theory = foreseen(world.rank, plan, kind, clip=clip)
    model = theory.of(batch(ours, kind, 0)).model
    pairs = [(lines(ours.sent()), start_bytes(ours.plan, model, world.rank))]
    for step in range(3):
        rows = batch(ours, kind, step)
        metrics = ours.step(rows)
        pairs.append((lines(ours.last), theory.of(rows).in_step(step)))
        assert metrics.bytes == sum(pairs[-1][1].values())
        assert ours.measured_bytes() == by_kind(pairs[-1][1])
    return [pair for pair in pairs if pair[0] != pair[1]]


@pytest.mark.parametrize("plan", PLANS)
def test_ledger_equals_prediction(plan: str):
    """Frozen layers, two types, buffers: before the first step and in each, on every line."""
    found = run_threads(Plan.parse(plan).size, differing, plan, "mixed", 1.0)
    assert found == [[]] * len(found)


@pytest.mark.parametrize("plan", ["dp2", "dp_replicate2 dp_shard2 zero3"])
def test_many_control_numbers_are_all_reduced(plan: str, monkeypatch: pytest.MonkeyPatch):
    """What ranks agree on in a step is predicted beyond the size up to which it is gathered too."""
    monkeypatch.setattr(moves, "GATHERED_BYTES", 100)
    assert ("dp", "all_reduce", "check") in step_bytes(Plan.parse("dp2"), plain(20))
    found = run_threads(Plan.parse(plan).size, differing, plan, "gpt", 1.0)
    assert found == [[]] * len(found)


@pytest.mark.parametrize("ranks", [64, 1024])
@pytest.mark.parametrize("row", ROWS)
def test_large_worlds_send_what_is_predicted(row: str, ranks: int):
    """A rank of a large world, traced, sends what is predicted of it."""
    plan = f"dp{ranks} {row} fp64"
    ours = engine(traced(3, ranks), plan)
    started = ours.sent()
    ours.step(batch(ours, "gpt", 0))
    told = foreseen(3, plan).of(batch(ours, "gpt", 0))
    assert lines(started) == start_bytes(ours.plan, told.model, 3)
    assert lines(ours.last) == told.in_step(0)


def plain(blocks: int = 4) -> ModelShape:
    units = (UnitShape(f"b{k}", (ParamShape(f"b{k}.w", (64, 64)),)) for k in range(blocks))
    return ModelShape(tuple(units))


@pytest.mark.parametrize(("row", "volumes"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3)])
@pytest.mark.parametrize("n", [2, 4, 64])
def test_volumes_of_the_paper(row: str, volumes: int, n: int):
    """A step sends 2, 2, 2 and 3 times the model, (n-1)/n of it a rank (ZeRO, section 7)."""
    sent = step_bytes(Plan.parse(f"dp{n} {row}"), plain())
    states = sum(count for line, count in sent.items() if line.phase != "check")
    assert states == volumes * plain().numel * 4 * (n - 1) // n


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_step_moves_are_the_same_sum(row: str, microbatches: int):
    """Units used twice send what the table's own list of moves says."""
    sent = step_bytes(Plan.parse(f"dp4 {row} accumulate:{microbatches}"), plain())
    states = sum(count for line, count in sent.items() if line.phase != "check")
    steps = step_moves(ROWS[row], plain().numel, 4, microbatches)
    assert states == 4 * sum(move.sent for move in steps)


def test_a_unit_that_stays_whole_is_sent_once():
    """Where backward wants a unit at once, or does not read it, a third of its bytes are saved."""
    once = ModelShape(tuple(UnitShape(u.name, u.params, again=0) for u in plain().units))
    plan = Plan.parse("dp2 zero3")
    gather = Line("dp", "all_gather", "backward")
    assert gather in step_bytes(plan, plain()) and gather not in step_bytes(plan, once)
