"""The states table against the figures that the ZeRO paper publishes."""

from dataclasses import replace

import pytest

from shardwise.core.layouts.layout import P, R, S
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import ALIASES, ROWS, Moment, Row, bytes_per_parameter, step_moves

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


def printed_digit(value: float) -> float:
    """One unit of the last digit that the paper prints of a value."""
    text = str(value).removesuffix(".0")
    return 10.0 ** -len(text.partition(".")[2])


@pytest.mark.parametrize("n", TABLE_1)
@pytest.mark.parametrize("stage", range(3), ids=STAGES)
@pytest.mark.parametrize("model", range(3), ids=["7.5B", "128B", "1T"])
def test_zero_table_1(n: int, stage: int, model: int):
    """Bytes a device are the paper's, to its last digit (it rounds some and truncates some)."""
    printed = TABLE_1[n][model][stage]
    ours = PARAMETERS[model] * bytes_per_parameter(ROWS[STAGES[stage]], n) / 1e9
    assert abs(ours - printed) < printed_digit(printed)


@pytest.mark.parametrize(
    ("row", "gigabytes"), [("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)]
)
def test_zero_figure_1(row: str, gigabytes: float):
    """Figure 1: 7.5 B parameters on 64 devices."""
    ours = round(7.5e9 * bytes_per_parameter(ROWS[row], 64) / 1e9, 1)
    assert ours == gigabytes


@pytest.mark.parametrize(
    ("row", "formula"),
    [
        ("ddp", lambda n: 16 + 0 / n),
        ("zero1", lambda n: 4 + 12 / n),
        ("zero2", lambda n: 2 + 14 / n),
        ("zero3", lambda n: 16 / n),
    ],
)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 64])
def test_bytes_formula(row: str, formula, n: int):
    """The bytes derived from the placements are the column of the design's table."""
    assert bytes_per_parameter(ROWS[row], n) == pytest.approx(formula(n), rel=1e-15)


@pytest.mark.parametrize("n", [2, 4, 64, 1024])
@pytest.mark.parametrize(("row", "volume"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3)])
def test_zero_section_7(row: str, volume: int, n: int):
    """A step sends 2 N under ddp, zero1 and zero2, and 3 N under zero3, times (n-1)/n."""
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
    """Over three microbatches ddp and zero1 send once, zero2 and zero3 what they must each time."""
    assert [move.what for move in step_moves(ROWS[row], 64, 4, microbatches=3)] == moves


@pytest.mark.parametrize("row", ROWS)
def test_one_rank_sends_nothing(row: str):
    """On one rank every row is the same: no moves, all the bytes."""
    assert step_moves(ROWS[row], 64, 1, microbatches=3) == []
    assert bytes_per_parameter(ROWS[row], 1) == 16


@pytest.mark.parametrize("row", ["zero1", "zero2", "zero3"])
def test_hybrid_is_a_row_for_each_axis(row: str):
    """Between groups only each rank's own block is reduced, once a step, before the update."""
    (between,) = [move for move in ROWS[row].moves() if move.axis == "replicate"]
    assert (between.moment, between.state, between.block) == (Moment.BEFORE_UPDATE, "grad", True)
    assert (between.src, between.dst) == (P, R)


def test_a_row_that_shards_nothing_lies_between_replicas():
    """All of the moves of ddp are on the replicate axis: one all-reduce before the update."""
    (move,) = ROWS["ddp"].moves()
    assert (move.axis, move.moment, move.block) == ("replicate", Moment.BEFORE_UPDATE, False)


def test_aliases_are_rows():
    """Every other name is the name of a row."""
    assert ALIASES == {"fsdp": "zero3"}
    assert set(ALIASES.values()) <= set(ROWS)


# --- rows that are not in the table, and tiers

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


def test_a_disk_is_reached_through_the_host():
    """Parameters on a disk are read before each use; gradient and state are, for the update."""
    moves = replace(ROWS["zero3"], param_tier="disk", optim_tier="disk").moves()
    copies = [move for move in moves if move.between_tiers]
    assert [(move.moment, move.state, move.src_tier, move.dst_tier) for move in copies] == [
        (Moment.USE, "param", "disk", "host"),
        (Moment.USE, "param", "host", "device"),
        (Moment.BEFORE_UPDATE, "grad", "device", "host"),
        (Moment.BEFORE_UPDATE, "grad", "host", "disk"),
        (Moment.UPDATE, "grad", "disk", "host"),
        (Moment.UPDATE, "optim", "disk", "host"),
        (Moment.AFTER_UPDATE, "optim", "host", "disk"),
        (Moment.AFTER_UPDATE, "param", "host", "disk"),
    ]
    assert (moves.fetch, moves.offload, moves.publish) == ("disk", "disk", "disk")


def test_axes_of_one_rank_and_frozen_parameters():
    """Ranks exchange nothing on an axis of one rank; frozen parameters are only used."""
    zero3 = ROWS["zero3"]
    offloaded = replace(zero3, param_tier="host", optim_tier="host")
    assert zero3.moves(1, 1) == ()
    assert [move.axis for move in zero3.moves(1, 4)] == ["replicate"]
    assert all(move.between_tiers for move in offloaded.moves(1, 1))
    assert {move.moment for move in offloaded.moves(trained=False)} == {Moment.USE}
    assert ROWS["zero1"].moves(trained=False) == ()
