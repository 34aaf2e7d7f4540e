"""The values that cross from stage to stage, computed from who makes and who uses them.

    value        made in   used in      bundle 0   bundle 1   bundle 2
    0 embed         0       0, 1           x
    1 positions     0       1, 3           x          x          x       passed on by 1 and 2
    2 blocks.1      1       2                         x

A *value* is an output tensor of a layer or of an operation between layers. Values are numbered in
the order of their creation, which is the same on every rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Spec(NamedTuple):
    """A tensor that crosses: shape in memory order, torch.dtype, whether a gradient returns."""

    shape: tuple[int, ...]
    dtype: Any
    requires_grad: bool


@dataclass(frozen=True)
class ForwardStep:
    """One step of a forward: the call of a layer, or an operation on values.

    what      the layer's name, or torch's function
    out       its output, with meta tensors instead of tensors
    numbers   of the tensors in `out`, in their order
    writes    (i, number): the i-th input tensor was written to, and is that value now
    reads     whether `out` is what the program read of values
    """

    what: Any
    stage: int
    out: Any
    numbers: tuple[int, ...]
    writes: tuple[tuple[int, int], ...] = ()
    reads: bool = False


@dataclass(frozen=True)
class StageTrace:
    """The description of a forward pass before it runs, for one set of shapes.

    bundles[s]    the tensors that stage s sends to later ones; one entry fewer than stages
    crossing[s]   the numbers of those values, ascending
    orders        by number, the memory order of the dims of values that are not contiguous
    written[s]    values of earlier stages that stage s writes to: it copies them first
    trained       values through which gradients flow
    read[s]       parameters of stage s, by number, that are read there outside of layers
    answers       what the forward read from the batch (techniques/pipeline/trace/answers.py)
    outside       the buffers outside of layers that it writes (trace/outside_buffers.py)
    """

    events: tuple[ForwardStep, ...]
    bundles: tuple[tuple[Spec, ...], ...]
    crossing: tuple[tuple[int, ...], ...]
    orders: Mapping[int, tuple[int, ...]]
    written: tuple[frozenset[int], ...]
    trained: frozenset[int]
    read: tuple[frozenset[int], ...]
    answers: tuple[Any, ...] = ()
    outside: tuple[Any, ...] = ()


def maker(made: Sequence[int], use: int) -> int | None:
    """The stage in `made` that provides the value to stage `use`; None if all are later."""
    return max((stage for stage in made if stage <= use), default=None)


def crossing(
    made: Sequence[Sequence[int]], used: Sequence[Sequence[int]], stages: int
) -> tuple[tuple[int, ...], ...]:
    """For each stage but the last, the values that cross to the next. made[n], used[n]: the stages
    that make (several may hold a parameter) and that use value n, never before it is made.
    """
    found: list[list[int]] = [[] for _ in range(stages - 1)]
    for number, (at, uses) in enumerate(zip(made, used, strict=True)):
        spans = [(first, use) for use in uses if (first := maker(at, use)) is not None]
        for stage, bundle in enumerate(found):
            if any(first <= stage < use for first, use in spans):
                bundle.append(number)
    return tuple(tuple(bundle) for bundle in found)
