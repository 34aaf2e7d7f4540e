"""The states table against the figures that the ZeRO paper publishes."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from shardwise.core.layouts.layout import P, R, S
from shardwise.core.model_spec import ModelShape, ParamShape, UnitShape
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import ALIASES, ROWS, Moment, Row, bytes_per_parameter, step_moves
from shardwise.prediction.stored_bytes import ADAM, held_bytes

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
    """Bytes a device are the paper's, to its last digit (it rounds some and truncates some).

    So are the bytes that are predicted of a model of that size.
    """
    for numel, row in zip(PARAMETERS, TABLE_1[n], strict=True):
        model = ModelShape((UnitShape("all", (ParamShape("w", (int(numel),), "bfloat16"),)),))
        for stage, printed in zip(STAGES, row, strict=True):
            digits = str(float(printed)).removesuffix(".0").partition(".")[2]
            ours = numel * bytes_per_parameter(ROWS[stage], n) / 1e9
            assert abs(ours - printed) < 10.0 ** -len(digits), stage
            held = held_bytes(Plan.parse(f"dp{n} {stage} bf16"), model, ADAM)
            states = sum(held[state] for state in ("parameters", "gradients", "optimizer"))
            assert states / 1e9 == pytest.approx(ours, rel=1e-5), stage


@pytest.mark.parametrize(
    ("row", "formula", "volume"),
    [
        ("ddp", lambda n: 16 + 0 / n, 2),
        ("zero1", lambda n: 4 + 12 / n, 2),
        ("zero2", lambda n: 2 + 14 / n, 2),
        ("zero3", lambda n: 16 / n, 3),
    ],
)
@pytest.mark.parametrize("n", [2, 4, 64])
def test_bytes_and_volume(row: str, formula: Callable[[int], float], volume: int, n: int):
    """Bytes a parameter are the design's column; a step sends 2 N or 3 N, times (n-1)/n."""
    assert bytes_per_parameter(ROWS[row], n) == pytest.approx(formula(n), rel=1e-15)
    numel = 1024 * 1024
    sent = sum(move.sent for move in step_moves(ROWS[row], numel, n))
    assert sent == volume * numel * (n - 1) // n


@pytest.mark.parametrize(
    ("row", "moves"),
    [
        ("ddp", ["all_reduce"]),
        ("zero1", ["reduce_scatter", "all_gather"]),
        ("zero2", ["reduce_scatter"] * 3 + ["all_gather"]),
        ("zero3", ["all_gather", "all_gather", "reduce_scatter"] * 3),
    ],
)
def test_accumulation(row: str, moves: list[str]):
    """Over three microbatches ddp and zero1 send once, the others each time; one rank never."""
    assert [move.what for move in step_moves(ROWS[row], 64, 4, microbatches=3)] == moves
    assert step_moves(ROWS[row], 64, 1, microbatches=3) == []
    assert bytes_per_parameter(ROWS[row], 1) == 16


def test_hybrid_is_a_row_for_each_axis():
    """Between groups each rank's own block is reduced, once a step, before the update."""
    for row in STAGES:
        (between,) = [move for move in ROWS[row].moves() if move.axis == "replicate"]
        assert (between.moment, between.state) == (Moment.BEFORE_UPDATE, "grad")
        assert (between.src, between.dst, between.block) == (P, R, True)
    (move,) = ROWS["ddp"].moves()
    assert (move.axis, move.moment, move.block) == ("replicate", Moment.BEFORE_UPDATE, False)


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


def test_axes_of_one_rank_and_frozen_parameters():
    """Ranks exchange nothing on an axis of one rank; frozen parameters are only used."""
    zero3 = ROWS["zero3"]
    offloaded = replace(zero3, param_tier="host", optim_tier="host")
    assert zero3.moves(1, 1) == ()
    assert [move.axis for move in zero3.moves(1, 4)] == ["replicate"]
    assert all(move.between_tiers for move in offloaded.moves(1, 1))
    assert {move.moment for move in offloaded.moves(trained=False)} == {Moment.USE}
    assert ROWS["zero1"].moves(trained=False) == ()
