"""How the parameters of a unit are laid end to end and cut evenly over the ranks.

    | q       | k       |#| v      |# ...  |##########|      # padding
    |  block of rank 0       |  block of rank 1       |

Every parameter begins at a multiple of 64 bytes (a cache line; vector instructions and GPU copies
want it), and the whole is padded to as many equal blocks, each a multiple of 64 bytes, as there are
ranks. The padding is part of what is stored and sent, so it is part of every prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN_BYTES = 64


@dataclass(frozen=True)
class Flattening:
    """Where each parameter lies: `offsets` and sizes in elements, padding included in `padded`."""

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    padded: int
    ranks: int

    @property
    def share(self) -> int:
        """How many elements each rank's block has."""
        return self.padded // self.ranks

    def piece(self, index: int, rank: int) -> tuple[int, int]:
        """The part of parameter `index` in the block of `rank`: start and stop within that block.

        Start and stop are equal where the block holds nothing of the parameter.
        """
        low = self.offsets[index] - rank * self.share
        start = min(max(low, 0), self.share)
        stop = min(max(low + self.numels[index], 0), self.share)
        return start, stop

    def origin(self, index: int, rank: int) -> int:
        """Which element of the parameter, counted row-major, that part begins with."""
        return min(max(rank * self.share - self.offsets[index], 0), self.numels[index])


def flatten(numels: Sequence[int], element_bytes: int, ranks: int) -> Flattening:
    """Lay parameters of `numels` elements end to end for `ranks` equal blocks."""
    align = max(1, ALIGN_BYTES // element_bytes)
    offsets: list[int] = []
    end = 0
    for numel in numels:
        offsets.append(end)
        end += numel + -numel % align
    padded = end + -end % (align * ranks)
    return Flattening(tuple(numels), tuple(offsets), padded, ranks)
