"""Uneven shards: the ranges of one dim of a tensor that each rank of an axis holds.

    even(0, 10, 4)                0 1 | 2 3 4 | 5 6 | 7 8 9       sizes differ by at most one grain
    even(0, 8, 2, grain=4)        0..3 | 4..7                      whole heads of width 4
    packed(0, [q, k, v])          q0 k0 v0 | q1 k1 v1              several packed tensors
    heads(6, 2, 4)                queries 0 | 1 2 | 3 | 4 5        keys 0 | 0 | 1 | 1

If all ranks hold ranges of one size, this is `S(d)` of a layout. If there are fewer key heads than
ranks, several ranks hold the same range, and its gradient is the sum of theirs. If a weight packs
keys with queries, these ranks have that range in common, and their other ranges differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Range = tuple[int, int]
#: The counts of rows of the base data ranks, in their order.
Counts = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """`ranges[r]` are the intervals [start, stop) of dim `dim`, of length `whole`, on rank r."""

    dim: int
    whole: int
    ranges: tuple[tuple[Range, ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.ranges)

    def size(self, rank: int) -> int:
        """The length of the dim on `rank`."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def holders(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same ranges as `rank`, including itself."""
        return tuple(r for r, ranges in enumerate(self.ranges) if ranges == self.ranges[rank])

    @property
    def shared(self) -> bool:
        """Whether any two ranks hold the same ranges."""
        return any(len(self.holders(rank)) > 1 for rank in range(self.ranks))

    def common(self, rank: int) -> dict[tuple[int, ...], list[tuple[int, int]]]:
        """Spans that `rank` has in common with ranks whose other ranges differ.

        Maps the ranks, including itself, to their common spans (start on the rank, length).
        """
        found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        offset = 0
        for start, stop in self.ranges[rank]:
            holders = tuple(r for r, ranges in enumerate(self.ranges) if (start, stop) in ranges)
            if len(holders) > 1 and holders != self.holders(rank):
                found.setdefault(holders, []).append((offset, stop - start))
            offset += stop - start
        return found

    def on(self, dim: int) -> "Cut":
        """The same ranges of another dim."""
        return Cut(dim, self.whole, self.ranges)

    def shape(self, whole: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape on `rank` of a tensor whose full shape is `whole`."""
        return (*whole[: self.dim], self.size(rank), *whole[self.dim + 1 :])

    def full_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The full shape of a tensor whose shape on some rank is `local`."""
        return (*local[: self.dim], self.whole, *local[self.dim + 1 :])

    def spans(self, rank: int, low: int, high: int) -> list[tuple[int, int, int]]:
        """The interval [low, high) of the dim on `rank`, mapped to the full dim.

        Pieces (start on the rank, start in the full dim, length), in order.
        """
        found: list[tuple[int, int, int]] = []
        offset = 0
        for start, stop in self.ranges[rank]:
            first, last = max(low, offset), min(high, offset + stop - start)
            if first < last:
                found.append((first, start + first - offset, last - first))
            offset += stop - start
        return found


def even(dim: int, whole: int, ranks: int, grain: int = 1) -> Cut:
    """Consecutive ranges whose lengths are multiples of `grain` and differ by at most one grain.

    Raises ValueError if `grain` does not divide `whole`.
    """
    if whole % grain:
        raise ValueError(f"{whole} is not a multiple of the grain {grain}")
    return _scaled(dim, whole, _balanced(whole // grain, ranks), grain)


def packed(dim: int, parts: Sequence[Cut]) -> Cut:
    """The ranges of tensors packed along `dim`, each sharded by its own Cut."""
    ranges: list[tuple[Range, ...]] = []
    for rank in range(parts[0].ranks):
        mine: list[Range] = []
        offset = 0
        for part in parts:
            mine += [(start + offset, stop + offset) for start, stop in part.ranges[rank]]
            offset += part.whole
        ranges.append(tuple(mine))
    return Cut(dim, sum(part.whole for part in parts), tuple(ranges))


def heads(queries: int, keys: int, ranks: int) -> tuple[Cut, Cut]:
    """The query heads of each rank, and the key heads that they use, counted in heads.

    With at least as many key heads as ranks, a rank has complete groups; with fewer, several ranks
    share a key head and divide its query heads (arXiv 2305.13245). Raises ValueError if some rank
    would have no query head, or `keys` does not divide `queries`.
    """
    if queries % keys:
        raise ValueError(f"{keys} key heads do not divide {queries} query heads")
    group = queries // keys
    if keys >= ranks:
        kv = even(0, keys, ranks)
        return Cut(0, queries, tuple(_times(ranges, group) for ranges in kv.ranges)), kv
    q_ranges: list[tuple[Range, ...]] = []
    kv_ranges: list[tuple[Range, ...]] = []
    for key, ((first, last),) in enumerate(_balanced(ranks, keys)):
        if last - first > group:
            raise ValueError(f"{queries} query heads for {ranks} ranks in groups of {group}")
        for ((start, stop),) in _balanced(group, last - first):
            q_ranges.append(((key * group + start, key * group + stop),))
            kv_ranges.append(((key, key + 1),))
    return Cut(0, queries, tuple(q_ranges)), Cut(0, keys, tuple(kv_ranges))


def wide(cut: Cut, dim: int, width: int) -> Cut:
    """A cut counted in heads, converted to features; each head has `width` features."""
    return _scaled(dim, cut.whole * width, cut.ranges, width)


def _balanced(count: int, ranks: int) -> tuple[tuple[Range, ...], ...]:
    edges = [count * rank // ranks for rank in range(ranks + 1)]
    return tuple(((edges[r], edges[r + 1]),) for r in range(ranks))


def _scaled(dim: int, whole: int, ranges: Sequence[tuple[Range, ...]], width: int) -> Cut:
    return Cut(dim, whole, tuple(_times(mine, width) for mine in ranges))


def _times(ranges: tuple[Range, ...], width: int) -> tuple[Range, ...]:
    return tuple((start * width, stop * width) for start, stop in ranges)
