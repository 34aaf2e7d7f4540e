"""How ranks hold one parameter: what each makes of its gradient, and who counts and saves it."""

from collections.abc import Iterator
from itertools import product

import pytest

from shardwise.core.layouts.layout import I, P, R, S
from shardwise.core.layouts.param_layout import AxisLayout, Layout
from shardwise.core.layouts.uneven import Cut, even, packed
from shardwise.core.model_spec import ModelShape, ParamShape, UnitShape
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import ROWS, Row
from shardwise.prediction.stored_bytes import PLAIN, held_bytes
from shardwise.prediction.traffic import by_kind, step_bytes

#: Queries for four ranks, keys for pairs of them: packed in one weight.
QKV = packed(0, [even(0, 8, 4), Cut(0, 4, (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)))])
KEYS = Cut(0, 4, (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)))


@pytest.mark.parametrize(
    ("layout", "groups", "replicas"),
    [
        (AxisLayout(I, 4), (), [0, 1, 2, 3]),
        (AxisLayout(R, 4), ((0, 1, 2, 3),), [0, 1, 2, 3]),
        (AxisLayout(R, 4, holders=(1, 3)), ((1, 3),), [None, 0, None, 1]),
        (AxisLayout.sharded(even(0, 10, 4)), (), [0, 0, 0, 0]),
        (AxisLayout.sharded(KEYS), ((0, 1), (2, 3)), [0, 1, 0, 1]),
    ],
)
def test_one_axis(layout: AxisLayout, groups: object, replicas: list[int | None]):
    """R is summed over its holders, a cut over ranks that share ranges; each has a first rank."""
    assert layout.groups == groups
    holders = [rank for rank in range(4) if replicas[rank] is not None]
    assert [layout.replica(rank) for rank in holders] == [replicas[r] for r in holders]
    for rank in holders:
        assert rank in layout.group(rank)


def test_what_is_shared_in_part():
    """Of a packed weight the keys are shared by pairs: their spans, and the ranks of the pair."""
    layout = Layout(axes=(("tp", AxisLayout.sharded(QKV)),))
    shared = layout.on("tp").shared(3)
    assert shared is not None
    assert (shared.dim, shared.spans, shared.ranks) == (0, ((2, 2),), (2, 3))
    assert shared.includes(2)
    assert not shared.includes(1)
    assert layout.shared_numel("tp", {"tp": 3}, (4, 5)) == 10
    assert layout.full_shape((4, 5)) == (12, 5)
    assert layout.on("tp").groups == ()


def coordinates(**sizes: int) -> Iterator[dict[str, int]]:
    for place in product(*map(range, sizes.values())):
        yield dict(zip(sizes, place, strict=True))


def test_one_rank_is_the_first():
    """Of all ranks that hold the same part one has replica 0; of all holders one is the first."""
    axes = ("tp", AxisLayout.sharded(even(0, 6, 2))), ("pp", AxisLayout(R, 3, holders=(0, 2)))
    layout = Layout(axes=axes)
    here = [c for c in coordinates(tp=2, pp=3) if c["pp"] != 1]
    assert [layout.replica(c) for c in here] == [0, 1, 0, 1]
    assert sum(layout.holder(c) == 0 for c in here) == 1
    assert layout.tied


def test_kinds():
    """Parameters cut in different ways may be laid end to end; not those summed in other ways."""
    cut, other = even(0, 6, 2), even(1, 8, 2)
    kinds = [
        Layout(row, "dp", "none", (("tp", on),)).kind
        for row, on in [
            (ROWS["zero1"], AxisLayout.sharded(cut)),
            (ROWS["zero1"], AxisLayout.sharded(other)),
            (ROWS["zero1"], AxisLayout(I, 2)),
            (ROWS["zero1"], AxisLayout(R, 2)),
            (ROWS["zero3"], AxisLayout(R, 2)),
        ]
    ]
    assert kinds[0] == kinds[1]
    assert len(set(kinds)) == 4


def test_an_expert():
    """An expert: sharded over ep, a row of its own over the data axis that is left beside it."""
    axes = (("ep", AxisLayout.sharded(even(0, 8, 4))),)
    layout = Layout(ROWS["zero1"], "dp", "none", axes)
    assert str(layout) == "ep=S0 zero1 over dp"
    assert layout.on("ep").placement == S(0)
    assert layout.on("ep").groups == ()  # each rank has all of its experts' gradient
    assert layout.full_shape((2, 3, 5)) == (8, 3, 5)
    assert [layout.replica({"ep": rank}) for rank in range(4)] == [0, 0, 0, 0]
    unit = UnitShape("experts", (ParamShape("w", (2, 64), layout=layout),))
    plan = Plan.parse("dp2 zero1")
    held = held_bytes(plan, ModelShape((unit,)), PLAIN)
    assert held["parameters"] == 2 * 64 * 4


def test_a_unit_with_a_row_of_its_own():
    """The row of a layout, and not the plan's, says what its unit holds and sends."""
    rows = {"a": ROWS["zero3"], "b": Row(R, P, S(0))}
    units = [
        UnitShape(name, (ParamShape(name, (64, 64), layout=Layout(row, "dp")),))
        for name, row in rows.items()
    ]
    numel, plan = 64 * 64, Plan.parse("dp2 zero2")
    held = held_bytes(plan, ModelShape(tuple(units)), PLAIN)
    assert held["parameters"] == (numel // 2 + numel) * 4
    sent = by_kind(step_bytes(plan, ModelShape(tuple(units))))
    small = by_kind(step_bytes(plan, ModelShape(tuple(units[:1]))))
    assert sent["dp reduce_scatter"] == 2 * numel // 2 * 4
    assert small["dp reduce_scatter"] == numel // 2 * 4
