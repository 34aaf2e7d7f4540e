from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.core.tree import leaves, mapped


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Box:
    content: Any
    label: str = "label"


class Special(OrderedDict[str, Any]):
    """A dict of another class."""


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
