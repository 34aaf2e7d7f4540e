"""Which values cross from stage to stage, read off who makes and who uses them.

    value        made in   used in      bundle 0   bundle 1   bundle 2
    0 embed         0       0, 1           x
    1 positions     0       1, 3           x          x          x       handed on by 1 and 2
    2 blocks.1      1       2                         x

A *value* is a tensor that comes out of a layer or of an operation between layers. Values are
numbered in the order of their making, which is the same on every rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Spec(NamedTuple):
    """A tensor that crosses: its shape as it lies in memory, its dtype, whether a gradient returns.

    The dtype is one of torch's.
    """

    shape: tuple[int, ...]
    dtype: Any
    requires_grad: bool


@dataclass(frozen=True)
class Event:
    """One step of a forward: the call of a layer, or an operation on values.

    what      the layer's name, or torch's function
    out       what it gives, with meta tensors for tensors
    numbers   of the tensors in `out`, in their order
    writes    (i, number): the i-th tensor it was given was written to, and is that value now
    """

    what: Any
    stage: int
    out: Any
    numbers: tuple[int, ...]
    writes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Trace:
    """All that is known of a forward before it is run, for one set of shapes.

    bundles[s]    what leaves stage s for later ones; one fewer than stages
    crossing[s]   the numbers of those values, ascending
    orders        by number, the order of dims in which a value that is not contiguous lies
    written[s]    values of earlier stages that stage s writes to: it copies them first
    trained       values through which gradients flow
    read[s]       parameters of stage s, by number, that are read there outside of layers
    """

    events: tuple[Event, ...]
    bundles: tuple[tuple[Spec, ...], ...]
    crossing: tuple[tuple[int, ...], ...]
    orders: Mapping[int, tuple[int, ...]]
    written: tuple[frozenset[int], ...]
    trained: frozenset[int]
    read: tuple[frozenset[int], ...]


def maker(made: Sequence[int], use: int) -> int | None:
    """The stage, of those that make a value, whose value stage `use` takes; None: all are later."""
    return max((stage for stage in made if stage <= use), default=None)


def crossing(
    made: Sequence[Sequence[int]], used: Sequence[Sequence[int]], stages: int
) -> tuple[tuple[int, ...], ...]:
    """For each stage but the last, the numbers of the values that cross from it to the next.

    made[n], used[n]: the stages that make value n (several: a parameter held by several) and that
    use it. A value is made no later than used.
    """
    found: list[list[int]] = [[] for _ in range(stages - 1)]
    for number, (at, uses) in enumerate(zip(made, used, strict=True)):
        spans = [(first, use) for use in uses if (first := maker(at, use)) is not None]
        for stage, bundle in enumerate(found):
            if any(first <= stage < use for first, use in spans):
                bundle.append(number)
    return tuple(tuple(bundle) for bundle in found)
