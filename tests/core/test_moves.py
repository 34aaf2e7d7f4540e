"""Moves, their adjoints and their prices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.layouts.layout import I, P, Placement, R, S
from shardwise.core.moves import price

ALL = (R, I, P, S(0), S(1))


def is_move(src: Placement, dst: Placement) -> bool:
    try:
        price(src, dst, 1, 2)
    except ValueError:
        return False
    return True


MOVES = [(src, dst) for src in ALL for dst in ALL if is_move(src, dst)]


def test_which_moves_exist():
    """Every pair is a move but those that would change the value or hide a difference."""
    missing = {(src, dst) for src in ALL for dst in ALL} - set(MOVES)
    assert missing == {(R, I), (R, P), (I, P)}


@pytest.mark.parametrize(("src", "dst"), MOVES, ids=str)
def test_backward_is_duality(src: Placement, dst: Placement):
    """The adjoint of every move is a move, and the adjoint of the adjoint is the move."""
    move = price(src, dst, 24, 4)
    back = price(*move.adjoint, 24, 4)
    assert back.adjoint == (src, dst)
    assert price(*back.adjoint, 24, 4) == move


@pytest.mark.parametrize(
    ("src", "dst", "what", "adjoint"),
    [
        (P, R, "all_reduce", "all_reduce"),
        (P, I, "all_reduce", "keep"),
        (I, R, "keep", "all_reduce"),
        (S(0), R, "all_gather", "reduce_scatter"),
        (P, S(0), "reduce_scatter", "all_gather"),
        (S(0), I, "all_gather", "take_block"),
        (I, S(0), "take_block", "all_gather"),
        (R, S(0), "take_block", "pad_block"),
        (S(0), P, "pad_block", "take_block"),
        (S(0), S(1), "all_to_all", "all_to_all"),
        (S(1), S(1), "keep", "keep"),
    ],
    ids=str,
)
def test_what_is_done(src: Placement, dst: Placement, what: str, adjoint: str):
    """Each pair of placements is the collective that the field knows, forward and backward."""
    move = price(src, dst, 24, 4)
    assert move.what == what
    assert price(*move.adjoint, 24, 4).what == adjoint


@given(st.integers(2, 64), st.integers(0, 10**9))
def test_ring_bound(n: int, block: int):
    """A gather sends its own block on n-1 times; a reduction to all costs a reduction and a gather.

    With even blocks the prices are whole numbers, exactly.
    """
    numel = n * n * block
    gather = price(S(0), R, numel, n).sent
    assert gather == (n - 1) * n * block
    assert price(P, S(0), numel, n).sent == gather
    assert price(P, R, numel, n).sent == 2 * gather
    assert price(S(0), S(1), numel, n).sent * n == gather


@pytest.mark.parametrize(("src", "dst"), MOVES, ids=str)
def test_one_rank_moves_nothing(src: Placement, dst: Placement):
    """On an axis of size one every move is kept and free."""
    move = price(src, dst, 24, 1)
    assert (move.what, move.sent) == ("keep", 0)


@pytest.mark.parametrize("n", [1, 2])
def test_no_such_move(n: int):
    """A pair that is no move is refused, on one rank too, so that plans fail alike everywhere."""
    with pytest.raises(ValueError, match="there is no move from R to P"):
        price(R, P, 4, n)
