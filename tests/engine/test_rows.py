"""Rows that are not in the table: written down, and trained without another line of code."""

from dataclasses import replace

import pytest

from shardwise.core.errors import InputError
from shardwise.core.layout import P, R, S
from shardwise.core.plan import Plan
from shardwise.core.zero import ROWS, Moment, Row

#: Gradients are replicated: summed after each backward pass; each rank updates its block.
INVENTED = Row(param=R, grad=R, optim=S(0))


def test_the_word_of_a_row():
    """A row prints as its name, or written out; the plan that names it has that text too."""
    assert [str(row) for row in ROWS.values()] == list(ROWS)
    assert str(INVENTED) == "row:R,R,S"
    assert str(Plan.parse("dp2 row:R,P,S")) == "dp2 zero1"
    assert Plan.parse(f"dp2 {INVENTED}").row == "row:R,R,S"
    assert Plan.parse("dp2 row:R,R,S").shard_axis == "dp"
    assert Plan.parse("dp2 row:R,R,R").replicate_axis == "dp"


def test_tiers():
    """States rest on the device; the optimizer's may rest on the host: two copies of a block."""
    assert {move.src_tier for move in INVENTED.moves()} == {"device"}
    for row in ROWS.values():
        offloaded = replace(row, optim_tier="host")
        more = [move for move in offloaded.moves() if move not in row.moves()]
        tiers = [(move.state, move.src_tier, move.dst_tier) for move in more]
        assert tiers == [("grad", "device", "host"), ("param", "host", "device")]
        assert all(move.block and move.src == move.dst == row.optim for move in more)
        assert [move for move in offloaded.moves() if move not in more] == list(row.moves())
    with pytest.raises(InputError, match=r"optimizer state on the tier 'tape'.*host or disk"):
        Row(R, P, S(0), optim_tier="tape")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="parameter on the tier 'host'"):
        Row(S(0), S(0), S(0), param_tier="host")
    with pytest.raises(InputError, match="parameter on the tier 'host'"):
        Row(R, S(0), S(0), param_tier="host", optim_tier="host")


def test_tiers_of_parameters():
    """Parameters on the host are copied before each use, and not after the update."""
    for row in (ROWS["ddp"], ROWS["zero3"]):
        offloaded = replace(row, param_tier="host", optim_tier="host")
        more = [move for move in offloaded.moves() if move not in row.moves()]
        tiers = [(move.moment, move.state, move.src_tier, move.dst_tier) for move in more]
        assert tiers == [
            (Moment.USE, "param", "host", "device"),
            (Moment.BEFORE_UPDATE, "grad", "device", "host"),
        ]
        assert offloaded.moves()[0] == more[0]
