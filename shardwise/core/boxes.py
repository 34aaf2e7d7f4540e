"""The cutting of a flat interval into boxes: from a slice of memory to blocks of a tensor.

A flat shard holds the elements [start, stop) of a tensor laid out row-major, which is rarely a
block of the tensor. It is at most 2 d - 1 blocks of a tensor of d dims, for example of 4 x 5:

    . . . a a        [3, 17) =  a: offsets (0, 3) sizes (1, 2)
    b b b b b                   b: offsets (1, 0) sizes (2, 5)
    b b b b b                   c: offsets (3, 0) sizes (1, 2)
    c c . . .

Each box is contiguous in the shard too, so a view is enough to read or to write it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box1:
    """A block of a tensor whose elements are consecutive in row-major order.

    `offsets` and `sizes` have one entry for each dim; `start` is the flat index, in the tensor, of
    its first element, so that it holds the flat elements [start, start + numel).
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """How many elements the box has."""
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box1]:
    """The boxes that hold the flat elements [start, stop) of a tensor, in their order.

    An empty interval has none; a tensor without dims has one box without dims. Raises ValueError
    for an interval that is not inside the tensor.
    """
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"[{start}, {stop}) is not inside the {numel} elements of {tuple(shape)}")
    return _cut(tuple(shape), start, stop, 0) if start < stop else []


def _cut(shape: tuple[int, ...], start: int, stop: int, base: int) -> list[Box1]:
    """The boxes of a non-empty interval of a tensor whose first element is at flat index `base`."""
    if not shape:
        return [Box1((), (), base)]
    inner = shape[1:]
    row = math.prod(inner)
    first, last = -(-start // row), stop // row  # the whole rows are [first, last)
    if first > last:  # begins and ends inside one row
        return _inside(inner, last, (start - last * row, stop - last * row), base + last * row)
    found: list[Box1] = []
    if start < first * row:
        above = first - 1
        found += _inside(inner, above, (start - above * row, row), base + above * row)
    if first < last:
        offsets = (first, *(0 for _ in inner))
        found.append(Box1(offsets, (last - first, *inner), base + first * row))
    if last * row < stop:
        found += _inside(inner, last, (0, stop - last * row), base + last * row)
    return found


def _inside(inner: tuple[int, ...], index: int, interval: tuple[int, int], base: int) -> list[Box1]:
    """The boxes of an interval of row `index`, as boxes of the tensor that has the row."""
    return [
        Box1((index, *box.offsets), (1, *box.sizes), box.start)
        for box in _cut(inner, *interval, base)
    ]
