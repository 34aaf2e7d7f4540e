"""The cutting of flat intervals into boxes."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.layouts.boxes import Box1, boxes

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def intervals(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    ends = [draw(st.integers(0, math.prod(shape))) for _ in range(2)]
    return shape, min(ends), max(ends)


def flat_indices(shape: tuple[int, ...], box: Box1) -> list[int]:
    """The flat index of every element of a box, by walking it, in row-major order."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    ranges = [range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)]
    return [
        sum(i * stride for i, stride in zip(index, strides, strict=True))
        for index in itertools.product(*ranges)
    ]


@given(intervals())
def test_cover_exactly_once(case: tuple[tuple[int, ...], int, int]):
    """The boxes of an interval, in their order, are its elements, in their order."""
    shape, start, stop = case
    found = boxes(shape, start, stop)
    walked = [index for box in found for index in flat_indices(shape, box)]
    assert walked == list(range(start, stop))


@given(intervals())
def test_boxes_are_contiguous_and_few(case: tuple[tuple[int, ...], int, int]):
    """Each box is one run of memory that begins at `start`, inside the tensor; 2 d - 1 at most."""
    shape, start, stop = case
    found = boxes(shape, start, stop)
    assert len(found) <= max(2 * len(shape) - 1, 1)
    for box in found:
        assert flat_indices(shape, box) == list(range(box.start, box.start + box.numel))
        assert box.numel > 0
        for offset, size, dim in zip(box.offsets, box.sizes, shape, strict=True):
            assert 0 <= offset < offset + size <= dim


@given(SHAPES, st.integers(1, 5))
def test_shares_make_the_whole(shape: tuple[int, ...], n: int):
    """Cut evenly over n ranks, every element is in one box of one rank."""
    numel = math.prod(shape)
    share = -(-numel // n)
    cuts = [(min(r * share, numel), min((r + 1) * share, numel)) for r in range(n)]
    walked = [i for cut in cuts for box in boxes(shape, *cut) for i in flat_indices(shape, box)]
    assert walked == list(range(numel))


def test_figure():
    """The figure in the module is what the function gives."""
    a, b, c = boxes((4, 5), 3, 17)
    assert a == Box1(offsets=(0, 3), sizes=(1, 2), start=3)
    assert b == Box1(offsets=(1, 0), sizes=(2, 5), start=5)
    assert c == Box1(offsets=(3, 0), sizes=(1, 2), start=15)


def test_the_whole_is_one_box():
    """A whole tensor, with dims or without, is one box."""
    assert boxes((2, 3, 4), 0, 24) == [Box1((0, 0, 0), (2, 3, 4), 0)]
    assert boxes((), 0, 1) == [Box1((), (), 0)]
    assert boxes((3, 0), 0, 0) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_interval_outside(start: int, stop: int):
    """An interval that is not inside the tensor is an error, not a smaller box."""
    with pytest.raises(ValueError, match="is not inside the 6 elements"):
        boxes((2, 3), start, stop)
