"""Flattening: the offsets of a unit's parameters in one flat tensor, split evenly over ranks.

    | q       | k       |#| v      |# ...  |##########|      # padding
    |  block of rank 0       |  block of rank 1       |

Every parameter begins at a multiple of 64 bytes (a cache line, as vector instructions and GPU
copies need), and the flat tensor is padded to one equal block per rank, each a multiple of 64
bytes.  Padding is stored and sent too, so every prediction includes it.

Boxes: the elements [start, stop) of a row-major tensor of d dims rarely form one block of it, but
at most 2 d - 1 blocks.  For example in a tensor of 4 x 5:

    . . . a a        [3, 17) =  a: offsets (0, 3) sizes (1, 2)
    b b b b b                   b: offsets (1, 0) sizes (2, 5)
    b b b b b                   c: offsets (3, 0) sizes (1, 2)
    c c . . .

Each box is contiguous in the shard too, so it can be read and written through a view.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGN_BYTES = 64


@dataclass(frozen=True)
class Flattening:
    """Offsets and sizes of parameters in elements; `padded` is the total size with padding."""

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    padded: int
    ranks: int

    @property
    def share(self) -> int:
        return self.padded // self.ranks

    def piece(self, index: int, rank: int) -> tuple[int, int]:
        """The interval of the block of `rank` that holds parameter `index`; it may be empty."""
        low = self.offsets[index] - rank * self.share
        start = min(max(low, 0), self.share)
        stop = min(max(low + self.numels[index], 0), self.share)
        return start, stop

    def origin(self, index: int, rank: int) -> int:
        """The flat index, within the parameter, of the first element of that part."""
        return min(max(rank * self.share - self.offsets[index], 0), self.numels[index])


def flatten(numels: Sequence[int], element_bytes: int, ranks: int) -> Flattening:
    """Flatten parameters of `numels` elements into `ranks` equal blocks."""
    align = max(1, ALIGN_BYTES // element_bytes)
    offsets: list[int] = []
    end = 0
    for numel in numels:
        offsets.append(end)
        end += numel + -numel % align
    padded = end + -end % (align * ranks)
    return Flattening(tuple(numels), tuple(offsets), padded, ranks)


# --- boxes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box1:
    """A block of a tensor: its flat elements [start, start + numel), in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box1]:
    """The boxes of the flat elements [start, stop) of a tensor, in order; a 0-d tensor has one."""
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"[{start}, {stop}) is not inside the {numel} elements of {tuple(shape)}")
    return _cut(tuple(shape), start, stop, 0) if start < stop else []


def _cut(shape: tuple[int, ...], start: int, stop: int, base: int) -> list[Box1]:
    """The boxes of a non-empty interval; the tensor's first element has flat index `base`."""
    if not shape:
        return [Box1((), (), base)]
    inner = shape[1:]
    row = math.prod(inner)
    first, last = -(-start // row), stop // row  # complete rows: [first, last)
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
    return [
        Box1((index, *box.offsets), (1, *box.sizes), box.start)
        for box in _cut(inner, *interval, base)
    ]
