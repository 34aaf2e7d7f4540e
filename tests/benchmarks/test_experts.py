"""The suite `experts` on a model of no size: who trains the same mixture, and what it reports."""

import pytest

from benchmarks import table
from benchmarks.contenders.contender import Task
from benchmarks.contenders.roster import SUITES
from benchmarks.expert_shares import PARTS
from benchmarks.measure import Record, measure
from benchmarks.suite import plan_tasks
from shardwise.comm.world import World
from shardwise.models.gpt import GPTConfig
from tests.pool import run_gloo

MICRO = GPTConfig(vocabulary=64, layers=2, width=32, heads=4, kv_heads=2, hidden=48, sequence=8)
SAME = ("experts 8", "experts 8 without ep", "torch loop", "DeepSpeed MoE")
TASK = Task("micro", MICRO, ("dense", *SAME, "experts 4"), rows=4, rounds=1, warm_up=1)


def measured(world: World, task: Task) -> list[Record]:
    return measure(task)


@pytest.mark.full
def test_mixtures_of_eight_train_the_same_model() -> None:
    """Their losses agree; ours report their shares of a step; who is not installed says so."""
    rows = {row.contender: row for row in table.lines(TASK, run_gloo(2, measured, TASK))}
    for name in SAME:
        if "not installed" not in rows[name].note:
            assert rows[name].loss == pytest.approx(rows["torch loop"].loss, rel=1e-5)
    for name in ("experts 8", "experts 8 without ep", "experts 4"):
        assert all(part in rows[name].note for part in PARTS)
    assert rows["dense"].loss is not None
    sent, replicated = rows["experts 8"].wire_bytes, rows["torch loop"].wire_bytes
    assert sent is not None and replicated is not None and sent < replicated


def test_the_usual_size_is_the_small_one() -> None:
    """Without --size the suite does not build 64 experts of a larger model."""
    assert [task.size for task in plan_tasks("experts", (), 2, None, ())] == ["tiny"]
    assert plan_tasks("experts", (), 2, None, ())[0].contenders == SUITES["experts"]
