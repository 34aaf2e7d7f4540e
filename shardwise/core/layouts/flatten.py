"""Flattening: the offsets of a unit's parameters in one flat tensor, split evenly over ranks.

    | q       | k       |#| v      |# ...  |##########|      # padding
    |  block of rank 0       |  block of rank 1       |

Every parameter begins at a multiple of 64 bytes (a cache line, as vector instructions and GPU
copies need), and the flat tensor is padded to one equal block per rank, each a multiple of 64
bytes. Padding is stored and sent too, so every prediction includes it.
"""

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
        """The number of elements in each rank's block."""
        return self.padded // self.ranks

    def piece(self, index: int, rank: int) -> tuple[int, int]:
        """The part of parameter `index` in the block of `rank`: start and stop within the block.

        They are equal if the block contains nothing of the parameter.
        """
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
