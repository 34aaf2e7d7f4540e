"""Lowering: transfers that cannot cross or deadlock, parameters and gradients at the right time."""

import threading
from itertools import pairwise, permutations
from queue import Queue

import pytest

from shardwise.core.schedule.action import COMPUTE_OPS, Action, Token, Transfer
from shardwise.core.schedule.library import LIBRARY, build
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.relation import makes, needs, takes
from shardwise.core.schedule.schedule import Schedule
from tests.core.schedule.as_text import read, write
from tests.core.schedule.schedule_check import check
from tests.core.schedule.sizes import sizes

SOME = ["1f1b:3", "interleaved:4x3", "bfs:3x2", "zb-h1:5", "zb-v:5", "dualpipe-v:4", "pipedream:4"]


def test_two_ranks_of_1f1b():
    """The figure of lower.py: sent when made, received when needed, reduced after the last."""
    assert write(lower(build("1f1b:1", 2))).splitlines()[2:] == [
        "rank 0  F0.0 SEND:act0.0>1 RECV:grad1.0<1 B0.0 REDUCE:0",
        "rank 1  RECV:act0.0<0 F1.0 B1.0 SEND:grad1.0>0 REDUCE:1",
    ]


@pytest.mark.parametrize("name", LIBRARY)
def test_channels_keep_their_order(name: str):
    """Between each two ranks the order of sends is the order of receives, for every size."""
    for n in sizes(name):
        schedule = lower(LIBRARY[name].build(n))
        for a, b in permutations(range(schedule.ranks), 2):
            assert messages(schedule, a, "SEND", b) == messages(schedule, b, "RECV", a)


def messages(schedule: Schedule, rank: int, op: str, peer: int) -> list[Token]:
    """What a rank sends to a peer or receives from it, in order."""
    steps = [step for step in schedule.rows[rank] if isinstance(step, Transfer)]
    return [step.token for step in steps if (step.op, step.peer) == (op, peer)]


def test_what_was_sent_before_is_received_before():
    """Where outputs and gradients share a way, as in a V, some are received ahead of their use."""
    schedule = lower(build("zb-v:3", 2))
    early = 0
    for row in schedule.rows:
        for k, step in enumerate(row):
            if isinstance(step, Transfer) and step.op == "RECV":
                use = next(s for s in row[k:] if isinstance(s, Action))
                early += step.token not in needs(use, schedule)
    assert early > 0


@pytest.mark.parametrize("word", SOME)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_run_by_themselves_finish(word: str, ranks: int):
    """Threads with nothing but queues between them do every step, each with what it needs."""
    schedule = lower(build(word, ranks), gather=not word.startswith("pipedream"))
    wire = {(a, b): Queue[Token]() for a in range(ranks) for b in range(ranks)}
    left: dict[int, set[Token]] = {}

    def run(rank: int) -> None:
        here: set[Token] = set()
        for step in schedule.rows[rank]:
            if isinstance(step, Transfer) and step.op == "RECV":
                assert wire[step.peer, rank].get(timeout=30) == step.token
            assert here.issuperset(needs(step, schedule))
            if isinstance(step, Transfer) and step.op == "SEND":
                wire[rank, step.peer].put(step.token)
            here.difference_update(takes(step, schedule))
            here.update(makes(step, schedule))
        left[rank] = {token for token in here if token.kind != "weights"}

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left == {rank: set() for rank in range(ranks)}
    assert all(queue.empty() for queue in wire.values())


@pytest.mark.parametrize("word", [word for word in SOME if not word.startswith("pipedream")])
def test_parameters_are_whole_exactly_while_their_stage_computes(word: str):
    """GATHER and FREE stand around each run of uses of one stage, and hold nothing else."""
    for row in lower(build(word, 2), gather=True).rows:
        whole: list[int] = []
        actions = [step for step in row if isinstance(step, Action)]
        for action, after in pairwise(actions):
            if action.op == "GATHER":
                assert after.op in COMPUTE_OPS and not whole
                whole.append(action.stage)
            elif action.op in COMPUTE_OPS:
                assert whole == [action.stage]
            elif action.op == "FREE":
                assert whole.pop() == action.stage
        assert "GATHER" in {action.op for action in actions}


@pytest.mark.parametrize("word", [word for word in SOME if not word.startswith("pipedream")])
def test_each_stage_is_reduced_once_after_its_last_gradient(word: str):
    """REDUCE comes once a stage, behind its last B or W."""
    schedule = lower(build(word, 2))
    for rank, row in enumerate(schedule.rows):
        for stage in schedule.stages(rank):
            mine = [s.op for s in row if isinstance(s, Action) and s.stage == stage]
            assert mine.count("REDUCE") == 1
            assert mine[-1] == "REDUCE"
            assert mine[-2] in ("B", "W")


def test_one_stage_a_rank_is_gathered_once():
    """A rank with one stage has one run of uses: one GATHER and one FREE a step."""
    for row in lower(build("1f1b:4", 3), gather=True).rows:
        ops = [step.op for step in row]
        assert (ops.count("GATHER"), ops.count("FREE")) == (1, 1)


def test_a_lowered_schedule_is_lowered_already():
    """Lowering twice is lowering once; one rank needs no transfers."""
    whole = lower(build("zb-v:4", 2))
    assert lower(whole) is whole
    assert not any(
        isinstance(step, Transfer) for row in lower(build("gpipe:4", 1)).rows for step in row
    )


def test_streams_that_overtake_each_other_are_received_in_the_order_sent():
    """A gradient that is wanted before an output sent earlier waits for that output's receive."""
    schedule = read("rank 0 F0.0 F0.1 F2.0 B2.0 F2.1 B2.1 B0.0 B0.1\nrank 1 F1.0 B1.0 F1.1 B1.1")
    check(schedule)
    assert " ".join(map(str, lower(schedule).rows[1][:6])) == (
        "RECV:act0.0<0 F1.0 SEND:act1.0>0 RECV:act0.1<0 RECV:grad2.0<0 B1.0"
    )
