"""Small parts: texts of errors, trees of values, balanced cuts, values that cross stages."""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.balance import balanced
from shardwise.core.errors import InputError, Problem, bad, refusal
from shardwise.core.tools.suggest import beside
from shardwise.core.tools.tree import leaves, mapped
from shardwise.techniques.pipeline.stage_io import crossing, maker


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


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Box:
    content: Any
    label: str = "label"


class Named(OrderedDict[str, Any]):
    """Its constructor takes the items by name, as that of a ModelOutput of transformers."""

    def __init__(self, n: Any) -> None:
        super().__init__(n=n)
        self.size = 1


class Row(list[Any]):
    """Its constructor takes something else than the items."""

    def __init__(self, *, name: str) -> None:
        super().__init__()
        self.name = name


def test_a_changed_tree_is_a_copy_of_the_same_classes():
    """Leaves are found in order; the tree stays as it was, and so does what does not change."""
    tree = [1.5, (2.5, "a"), Point(3.5, None), {"k": [4.5]}, Box({"m": 5.5}), {1, 2}]
    assert leaves(tree, float) == [1.5, 2.5, 3.5, 4.5, 5.5]
    made = mapped(lambda x: -x, tree, float)
    assert made == [-1.5, (-2.5, "a"), Point(-3.5, None), {"k": [-4.5]}, Box({"m": -5.5}), {1, 2}]
    assert [type(x) for x in made] == [type(x) for x in tree]
    assert leaves(tree, float) == [1.5, 2.5, 3.5, 4.5, 5.5]
    assert mapped(lambda x: x, tree, float) is tree
    made = mapped(lambda x: -x if x == 1.5 else x, tree, float)
    assert all(a is b for a, b in zip(made[1:], tree[1:], strict=True))


def test_containers_with_constructors_of_their_own_are_copied():
    """No constructor is called: its arguments are not known."""
    row = Row(name="first")
    row.append(1.5)
    made = mapped(lambda x: -x, [Named(2.5), row], float)
    assert made == [{"n": -2.5}, [-1.5]]
    assert (type(made[0]), made[0].size, type(made[1]), made[1].name) == (Named, 1, Row, "first")
    assert row == [1.5]


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


def test_values_cross_from_their_maker_to_their_last_user():
    """The figure of the file; what nobody uses later stays; a tied weight is from the nearest."""
    made, used = [(0,), (0,), (1,)], [(0, 1), (1, 3), (2,)]
    assert crossing(made, used, 4) == ((0, 1), (1, 2), (1,))
    assert crossing([(0,), (1,)], [(0,), ()], 2) == ((),)
    assert crossing([(0, 2)], [(0, 1, 2, 3)], 4) == ((0,), (), (0,))
    assert [maker((1, 3), use) for use in range(5)] == [None, 1, 1, 3, 3]
