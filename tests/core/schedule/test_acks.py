"""What a rank has sent is proved to be there by what it receives, never too soon."""

import pytest

from shardwise.core.schedule.acks import acks
from shardwise.core.schedule.action import Token, Transfer
from shardwise.core.schedule.library import LIBRARY, build
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.simulate import simulate
from tests.core.schedule.sizes import sizes


@pytest.mark.parametrize("name", LIBRARY)
def test_what_is_proved_has_been_received(name: str):
    """In an order in which the steps can be done, no proof comes before the fact; none twice."""
    for n in sizes(name):
        whole = lower(LIBRARY[name].build(n))
        proofs = [acks(whole, rank) for rank in range(n.p)]
        sent: list[set[Token]] = [set() for _ in proofs]
        there: set[Token] = set()
        for rank, step in simulate(whole):
            if not isinstance(step, Transfer):
                continue
            if step.op == "SEND":
                sent[rank].add(step.token)
                continue
            there.add(step.token)
            proved = set(proofs[rank].get(step.token, ()))
            assert proved <= there & sent[rank]
            sent[rank] -= proved


@pytest.mark.parametrize(("word", "most"), [("1f1b:8", [4, 3, 2, 0]), ("gpipe:8", [8, 8, 8, 0])])
def test_few_messages_are_kept_for_want_of_a_proof(word: str, most: list[int]):
    """The most outputs that each rank keeps for the next: in 1F1B one for each tape."""
    whole = lower(build(word, 4))
    found = []
    for rank, row in enumerate(whole.rows):
        proofs, kept, peak = acks(whole, rank), set(), 0
        for step in (step for step in row if isinstance(step, Transfer)):
            if step.op == "RECV":
                kept.difference_update(proofs.get(step.token, ()))
            elif step.token.kind == "act":
                kept.add(step.token)
            peak = max(peak, len(kept))
        found.append(peak)
    assert found == most


def test_the_first_gradient_proves_the_output_it_is_of():
    """As in the figure: rank 1 sends grad1.0 once it has had act0.0."""
    whole = lower(build("1f1b:1", 2))
    assert acks(whole, 0) == {Token("grad", 1, 0): (Token("act", 0, 0),)}
    assert acks(whole, 1) == {Token("act", 0, 0): ()}
