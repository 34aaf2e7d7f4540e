from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.core.tools.tree import leaves, mapped


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Box:
    content: Any
    label: str = "label"


class Special(OrderedDict[str, Any]):
    """A dict of another class."""


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


TREE = [1.5, (2.5, "a"), Point(3.5, None), {"k": [4.5]}, Box({"m": 5.5}), Special(n=6.5), {1, 2}]


def test_every_leaf_is_found_in_order():
    """In lists, tuples, named tuples, dicts of any class and dataclasses."""
    assert leaves(TREE, float) == [1.5, 2.5, 3.5, 4.5, 5.5, 6.5]


def test_a_changed_tree_is_a_copy_of_the_same_classes():
    """The given tree is as it was; frozen dataclasses are copied with what has changed."""
    made = mapped(lambda x: -x, TREE, float)
    right = [-1.5, (-2.5, "a"), Point(-3.5, None), {"k": [-4.5]}, Box({"m": -5.5}), Special(n=-6.5)]
    assert made == [*right, {1, 2}]
    assert [type(x) for x in made] == [type(x) for x in TREE]
    assert leaves(TREE, float) == [1.5, 2.5, 3.5, 4.5, 5.5, 6.5]


def test_what_does_not_change_is_itself():
    """So that a list that somebody fills stays that list."""
    assert mapped(lambda x: x, TREE, float) is TREE
    made = mapped(lambda x: -x if x == 1.5 else x, TREE, float)
    assert all(a is b for a, b in zip(made[1:], TREE[1:], strict=True))


def test_containers_with_constructors_of_their_own_are_copied():
    """No constructor is called: its arguments are not known."""
    row = Row(name="first")
    row.append(1.5)
    made = mapped(lambda x: -x, [Named(2.5), row], float)
    assert made == [{"n": -2.5}, [-1.5]]
    assert (type(made[0]), made[0].size, type(made[1]), made[1].name) == (Named, 1, Row, "first")
    assert row == [1.5]
