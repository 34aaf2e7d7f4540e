"""The states table against the figures of the ZeRO paper; small parts of the core."""

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import InputError, Problem, bad, refusal
from shardwise.core.layouts.layout import R, S
from shardwise.core.layouts.uneven import balanced
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.arguments import beside
from shardwise.core.zero import ALIASES, ROWS, Moment, Row, bytes_per_parameter

#: arXiv 1910.02054, table 1: GB a device for 7.5 B, 128 B and 1 T parameters by number of ranks,
#: in the paper's stages P_os (zero1), P_os+g (zero2), P_os+g+p (zero3).
TABLE_1 = {
    1: [(120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)],
    4: [(52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)],
    16: [(35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)],
    64: [(31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)],
    256: [(30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)],
    1024: [(30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)],
}
PARAMETERS = (7.5e9, 128e9, 1e12)
STAGES = ("zero1", "zero2", "zero3")


@pytest.mark.parametrize("n", TABLE_1)
def test_zero_table_1(n: int):
    """Bytes a device are the paper's, to its last digit (it rounds some and truncates some)."""
    for numel, row in zip(PARAMETERS, TABLE_1[n], strict=True):
        for stage, printed in zip(STAGES, row, strict=True):
            digits = str(float(printed)).removesuffix(".0").partition(".")[2]
            ours = numel * bytes_per_parameter(ROWS[stage], n) / 1e9
            assert abs(ours - printed) < 10.0 ** -len(digits), stage


def test_the_word_of_a_row():
    """A row prints as its name, or written out; the plan that names it has that text too."""
    assert ALIASES == {"fsdp": "zero3"}
    assert [str(row) for row in ROWS.values()] == list(ROWS)
    invented = Row(param=R, grad=R, optim=S(0))
    assert str(invented) == "row:R,R,S"
    assert str(Plan.parse("dp2 row:R,P,S")) == "dp2 zero1"
    assert Plan.parse(f"dp2 {invented}").row == "row:R,R,S"
    assert Plan.parse("dp2 row:R,R,S").shard_axis == "dp"
    assert Plan.parse("dp2 row:R,R,R").replicate_axis == "dp"


#: The copies between tiers that states at rest elsewhere add to a row.
COPIES = {
    ("device", "host"): [
        (Moment.BEFORE_UPDATE, "grad", "device", "host"),
        (Moment.AFTER_UPDATE, "param", "host", "device"),
    ],
    ("host", "host"): [
        (Moment.USE, "param", "host", "device"),
        (Moment.BEFORE_UPDATE, "grad", "device", "host"),
    ],
    ("disk", "disk"): [
        (Moment.USE, "param", "disk", "host"),
        (Moment.USE, "param", "host", "device"),
        (Moment.BEFORE_UPDATE, "grad", "device", "host"),
        (Moment.BEFORE_UPDATE, "grad", "host", "disk"),
        (Moment.UPDATE, "grad", "disk", "host"),
        (Moment.UPDATE, "optim", "disk", "host"),
        (Moment.AFTER_UPDATE, "optim", "host", "disk"),
        (Moment.AFTER_UPDATE, "param", "host", "disk"),
    ],
}


@pytest.mark.parametrize(("param", "optim"), COPIES)
@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_tiers(param: str, optim: str, name: str):
    """Parameters off the device are copied before each use; a disk is reached through the host."""
    row = ROWS[name]
    moves = replace(row, param_tier=param, optim_tier=optim).moves()
    copies = [move for move in moves if move.between_tiers]
    found = [(move.moment, move.state, move.src_tier, move.dst_tier) for move in copies]
    assert found == COPIES[param, optim]
    assert [move for move in moves if move not in copies] == list(row.moves())
    assert {move.src_tier for move in row.moves()} == {"device"}


def test_the_text_of_an_error():
    """What was given, what is allowed, what to write, in one line; several are numbered."""
    error = bad("a\nb\x1b[0m.", "sizes from 1 up ", "dp2")
    assert isinstance(error, InputError)
    assert str(error) == "Given: a\\nb\\x1b[0m. Allowed: sizes from 1 up. Write instead: dp2."
    first, second = Problem("a", "b", "c"), Problem("d", "e", "f")
    assert str(refusal("it", [first])) == str(bad("a", "b", "c"))
    assert str(refusal("it", [first, second])).splitlines() == [
        "2 things are wrong with it.",
        f"1. {first}",
        f"2. {second}",
    ]


@pytest.mark.parametrize(
    ("path", "other"), [("runs/a", "runs/a-2"), (".", "here-2"), ("../here", "../here-2")]
)
def test_another_name_is_beside_the_first(
    path: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also for the folder one is in, which has no name of its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    expected = tmp_path / other if path == "." else Path(other)
    assert beside(Path(path)) == expected


def heaviest(weights: list[int], cuts: tuple[int, ...]) -> int:
    return max(sum(weights[a:b]) for a, b in pairwise((0, *cuts, len(weights))))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_the_heaviest_part_is_as_light_as_any_cut_makes_it(weights: list[int], data: Any):
    """Against all cuts; of those that are as good, the first in the order of their places."""
    parts = data.draw(st.integers(1, len(weights)))
    every = list(combinations(range(1, len(weights)), parts - 1))
    best = min(heaviest(weights, cuts) for cuts in every)
    assert balanced(weights, parts) == min(c for c in every if heaviest(weights, c) == best)
    assert balanced((0.1,) * 3, 3) == (1, 2)  # fractions, of which sums are rounded
