"""The plan checker: every problem, each with a remedy."""

import re

import pytest

from shardwise.core.errors import InputError
from shardwise.core.plan.plan import WORDS, Plan
from shardwise.core.plan.plan_check import problems, require


@pytest.mark.parametrize(
    ("text", "world"),
    [
        ("", 1),
        ("dp1 zero3", 1),
        ("dp2", 2),
        ("dp4 zero1 bf16 accumulate:4", 4),
        ("dp3 zero2 bucket:1MiB", 3),
        ("dp_replicate2 dp_shard2 zero3 fp16", 4),
        ("dp_replicate2 dp_shard1 zero1", 2),
        ("dp_replicate1 dp_shard2 zero1", 2),
        ("dp_shard2 zero2 fp64", 2),
        ("dp2 tp1 pp1", 2),
        ("dp2 zero3", None),
        ("zero3", 3),
        ("tp2 zero1", 6),
        ("pp2 1f1b:4", 8),
    ],
)
def test_plans_that_run(text: str, world: int | None):
    """What this version does has no problems; an axis of one rank is no technique."""
    assert problems(Plan.parse(text), world) == []
    require(Plan.parse(text), world)


@pytest.mark.parametrize(
    ("text", "world", "given", "instead"),
    [
        (
            "dp2",
            4,
            "needs 2 processes (dp2), where 4 run",
            "start 2 processes, or leave the data axis out",
        ),
        ("dp4 zero3", 2, "where 2 run", "start 4 processes"),
        ("dp2 zero3", 1, "where 1 runs", "start 2 processes"),
        ("dp1 zero3", 2, "needs 1 process (dp1)", "start 1 process"),
        ("dp_replicate2 dp_shard2 zero3", 8, "(dp_replicate2*dp_shard2)", "start 4 processes"),
        ("dp2", 0, "which needs 2 processes (dp2), where 0 run", "start 2"),
        ("dp2 dp_shard2 zero3", None, "'dp2 dp_shard2', which splits", "dp4 in place of dp2"),
        ("dp2 dp_replicate2", None, "'dp_replicate2 dp2', which splits", "dp4"),
        ("dp_replicate2 zero3", None, "'dp_replicate2' without dp_shard", "dp2"),
        ("dp_replicate2", None, "'dp_replicate2' under the row ddp", "dp2"),
        ("dp_shard2", None, "'dp_shard2' under the row ddp", "dp2"),
        ("dp_replicate2 dp_shard2", None, "under the row ddp", "dp4"),
        ("dp2 tp2", 6, "the plan 'dp2 tp2', which needs 4 processes", "start 4"),
        ("dp2 tp2 sp", 3, "needs 4 processes (dp2*tp2), where 3 run", "start 4"),
        ("tp3", 2, "needs 3 processes or a multiple (tp3), where 2 run", "start 3 processes"),
        ("pp2 interleaved:3x2", None, "3 microbatches for interleaved", "interleaved:4x2"),
        ("pp4 dualpipe-v:4", None, "4 microbatches for DualPipe-V on 4 ranks", "dualpipe-v:8"),
        ("pp2 1f1b:4", 3, "where 3 run", "start 2"),
        ("dp4 zero3 | head: tp4 zero1", 3, "where 3 run", "start 4"),
        ("dp2 cp2", 3, "needs 4 processes (dp2*cp2), where 3 run", "start 4"),
        ("ep2", 3, "'ep2' with dp3", "ep1"),
        ("dp4 ep3", None, "'ep3' with dp4", "ep2"),
        ("dp_replicate4 dp_shard2 ep4 zero3", None, "'ep4' with dp_shard2", "ep2"),
        ("dp4 ep2", 6, "needs 4 processes (dp4)", "start 4"),
        ("pp2 pipedream:8 fp16", None, "fp16 with pipedream:8, which updates", "pipedream:8 bf16'"),
        ("pp2 2bw:4 accumulate:2", None, "accumulate:2 with 2bw:4", "'pp2 2bw:4'"),
        (
            "pp2 dp2 zero3 pipedream:4",
            None,
            "zero3 with pipedream:4",
            "'pp2 dp2 zero2 pipedream:4'",
        ),
        ("pp4 2bw:2", None, "2 microbatches a batch for 2BW on 4 ranks", "2bw:4"),
        ("dp2 sp zero1", None, "'sp' without tensor parallelism", "the plan without sp, or tp2"),
        ("pp2 2bw:4 offload:optim", None, "offload:optim with 2bw:4", "'pp2 2bw:4'"),
        ("dp2 buffers:1KiB", None, "'buffers:1KiB' with 2 ranks on an axis", "buffers:1536B"),
        ("zero1 buffers:2KiB", 4, "'buffers:2KiB' with 4 ranks on an axis", "buffers:2560B"),
    ],
)
def test_one_problem(text: str, world: int | None, given: str, instead: str):
    """Each thing that cannot run is one problem that names it and the line to write."""
    [problem] = problems(Plan.parse(text), world)
    assert given in problem.given
    assert instead in problem.instead
    with pytest.raises(InputError, match=re.escape(str(problem))):
        require(Plan.parse(text), world)


def test_all_words_are_offered():
    """What is allowed in place of an unknown word are the words of the table."""
    with pytest.raises(InputError) as caught:
        require(Plan.parse("hello"))
    offered = str(caught.value).partition(". Allowed: ")[2].partition(". Write")[0].split()
    assert {word.form for word in WORDS} <= set(offered)


def test_every_problem_at_once():
    """All problems are reported together."""
    plan = Plan.parse("dp2 tp2 pp2 zero1 1f1b:8 bf16 sp cp2 ep3")
    found = problems(plan, 4)
    words = ["'ep3' with dp4", "the plan"]
    assert [problem.given.partition(",")[0].partition(" 'pp")[0] for problem in found] == words
    with pytest.raises(InputError, match="2 things are wrong with the plan 'pp2 dp2 ep3 tp2 cp2"):
        require(plan, 4)
