"""Lowering: transfers that cannot cross, memory at the right time; and the drawings."""

from itertools import permutations

import pytest

from shardwise.core.schedule.clock import ActionCosts, clock, simulate
from shardwise.core.schedule.draw import as_text, figure
from shardwise.core.schedule.library import LIBRARY, build
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.schedule import Schedule, Token, Transfer
from shardwise.techniques.pipeline.runtime import acks
from tests.core.schedule.schedules import sizes, write


def test_two_ranks_of_1f1b():
    """The figure of lower.py: sent when made, received when needed, reduced after the last."""
    whole = lower(build("1f1b:1", 2))
    assert write(whole) == [
        "rank 0  F0.0 SEND:act0.0>1 RECV:grad1.0<1 B0.0 REDUCE:0",
        "rank 1  RECV:act0.0<0 F1.0 B1.0 SEND:grad1.0>0 REDUCE:1",
    ]
    assert lower(whole) is whole
    assert acks(whole, 0) == {Token("grad", 1, 0): (Token("act", 0, 0),)}
    assert acks(whole, 1) == {Token("act", 0, 0): ()}


@pytest.mark.parametrize("name", LIBRARY)
def test_channels_keep_their_order_and_proofs_are_facts(name: str):
    """Between two ranks the order of sends is that of receives, for every size. In an order in
    which the steps can be done, no proof comes before its fact, and none twice.
    """
    for n in sizes(name):
        schedule = lower(LIBRARY[name].build(n))
        for a, b in permutations(range(schedule.ranks), 2):
            assert messages(schedule, a, "SEND", b) == messages(schedule, b, "RECV", a)
        proofs = [acks(schedule, rank) for rank in range(n.p)]
        sent: list[set[Token]] = [set() for _ in proofs]
        there: set[Token] = set()
        for rank, step in simulate(schedule):
            if isinstance(step, Transfer) and step.op == "SEND":
                sent[rank].add(step.token)
            elif isinstance(step, Transfer):
                there.add(step.token)
                proved = set(proofs[rank].get(step.token, ()))
                assert proved <= there & sent[rank]
                sent[rank] -= proved


def messages(schedule: Schedule, rank: int, op: str, peer: int) -> list[Token]:
    """What a rank sends to a peer or receives from it, in order."""
    steps = [step for step in schedule.rows[rank] if isinstance(step, Transfer)]
    return [step.token for step in steps if (step.op, step.peer) == (op, peer)]


FIGURES = {
    # forwards down, backwards up, the last microbatch first: figure 2c of the paper, at B = 2F
    "gpipe:3": [
        "F0 F1 F2 .. .. .. .. .. .. B2 -- B1 -- B0 --",
        ".. F0 F1 F2 .. .. .. B2 -- B1 -- B0 -- .. ..",
        ".. .. F0 F1 F2 B2 -- B1 -- B0 -- .. .. .. ..",
    ],
    # the steady state of one backward and one forward, and the drain
    "1f1b:4": [
        "F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --",
        ".. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..",
        ".. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..",
    ],
    # W where a rank would wait: figure 3 of the paper, at F = I = W
    "zb-h1:4": [
        "F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3",
        ".. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        ".. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ],
}


def drawn(word: str, ranks: int, costs: ActionCosts | None = None) -> list[str]:
    return [line[8:].rstrip() for line in as_text(clock(build(word, ranks), costs)).splitlines()]


@pytest.mark.parametrize(("word", "figure"), FIGURES.items())
def test_the_figure_of_the_paper(word: str, figure: list[str]):
    """On three ranks."""
    assert drawn(word, 3) == figure


def test_letters_and_columns():
    """The second chunk has small letters, more are numbered; a column is the shortest action."""
    assert drawn("interleaved:2x2", 2)[1].split()[:4] == ["..", "F0", "F1", "f0"]
    assert drawn("interleaved:2x3", 2)[1].split()[:4] == ["....", "F1.0", "F1.1", "F3.0"]
    assert drawn("1f1b:1", 2, ActionCosts(F=0.5, B=1.5, hop=0.1)) == [
        "F0 .. .. .. .. B0 -- --",
        ".. F0 B0 -- -- .. .. ..",
    ]
    assert drawn("naive", 2, ActionCosts(F=1, B=1, hop=0.6))[1] == ".. .. F0 B0 .."
    assert drawn("naive", 1, ActionCosts(0, 0, 0)) == [""]


def test_a_figure_is_to_scale():
    """One box an action, as wide as its time, with its microbatch; axes name ranks and time."""
    (axes,) = figure(clock(build("naive", 2)), "a < b").axes
    boxes = [path.get_extents() for drawn in axes.collections for path in drawn.get_paths()]
    found = sorted((round(box.y0 + box.height / 2), box.x0, box.x1) for box in boxes)
    assert found == [(0, 0, 1), (0, 4, 6), (1, 1, 2), (1, 2, 4)]
    assert (axes.get_title(), axes.get_xlabel()) == ("a < b", "time")
    assert [text.get_text() for text in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert [text.get_text() for text in axes.texts] == ["0"] * 4
