"""The positions of a sequence that each rank of the axis `cp` holds.

    ring, causal    zigzag: 2n chunks, rank r holds chunks r and 2n-1-r

                    0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15        T = 16, n = 4
                     r0    r1    r2    r3    r3     r2      r1      r0

    Ulysses, or a ring that is not causal: rank r holds block r of n

    ring times Ulysses (R x U): the ring has R ranks, and the positions of ring rank r, in the order
    above, are divided into U blocks; block u is on cp rank r * U + u

With zigzag every rank has an early and a late chunk, so in causal attention all ranks compute
equally many scores (Brandon et al., "Striped Attention", arXiv 2311.09431, states the imbalance of
blocks; Megatron-LM has these chunks). Two ranks differ by at most one position; a chunk may be
empty.
"""

from dataclasses import dataclass
from itertools import accumulate

from shardwise.core.layouts.uneven import Cut, Range, even
from shardwise.techniques.context.word import ContextWord


@dataclass(frozen=True)
class SequenceCut:
    """The division of `length` positions over `ranks` ranks, `ulysses` in each ring rank."""

    length: int
    ranks: int
    zigzag: bool
    ulysses: int = 1

    @property
    def ring(self) -> "SequenceCut":
        return SequenceCut(self.length, self.ranks // self.ulysses, self.zigzag)

    def chunks(self, rank: int) -> list[Range]:
        """A rank's positions as intervals [start, stop), in order; zigzag's two may be empty."""
        if self.ulysses > 1:
            return self._block(*divmod(rank, self.ulysses))
        blocks = [interval for (interval,) in even(0, self.length, self.ranks).ranges]
        if not self.zigzag:
            return [blocks[rank]]
        counts = [stop - start for start, stop in blocks]
        sizes = [count - count // 2 for count in counts] + [count // 2 for count in counts[::-1]]
        edges = [0, *accumulate(sizes)]
        return [(edges[place], edges[place + 1]) for place in (rank, 2 * self.ranks - 1 - rank)]

    def numel(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.chunks(rank))

    def on(self, dim: int) -> Cut:
        return Cut(dim, self.length, tuple(tuple(self.chunks(rank)) for rank in range(self.ranks)))

    def blocks(self, ring_rank: int) -> list[int]:
        first = ring_rank * self.ulysses
        return [self.numel(first + rank) for rank in range(self.ulysses)]

    def _block(self, ring_rank: int, block: int) -> list[Range]:
        ring = self.ring
        inner = even(0, ring.numel(ring_rank), self.ulysses)
        spans = ring.on(0).spans(ring_rank, *inner.ranges[block][0])
        return [(start, start + length) for _, start, length in spans]


def cut_of(length: int, context: ContextWord | None) -> SequenceCut:
    """How a plan divides the positions of a sequence; without the word one rank has all."""
    ranks, ulysses = (1, 1) if context is None else (context.ranks, context.ulysses)
    return SequenceCut(length, ranks, zigzag=ranks > ulysses, ulysses=ulysses)


def visible(cut: SequenceCut, rank: int, source: int) -> tuple[int, int]:
    """The part of a block of causal attention that is not masked: rows [first:], keys [:stop].

    Rows are those of `rank`, keys those of `source`, another ring rank:

        zigzag    source < rank      all rows, the first chunk of keys
                  source > rank      the second chunk of rows, all keys
        blocks    source < rank      all rows, all keys
                  source > rank      nothing
    """
    mine, theirs = cut.chunks(rank), cut.chunks(source)
    first = sum(stop - start for start, stop in mine if start < theirs[0][1])
    stop = sum(stop - start for start, stop in theirs if stop <= mine[-1][0])
    return first, stop
