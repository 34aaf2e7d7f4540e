"""Uneven shards: the ranges of one dim of a tensor that each rank of an axis holds.

    even(0, 10, 4)                0 1 | 2 3 4 | 5 6 | 7 8 9       sizes differ by at most one
    packed(0, [q, k, v])          q0 k0 v0 | q1 k1 v1              several packed tensors
    heads(6, 2, 4)                queries 0 | 1 2 | 3 | 4 5        keys 0 | 0 | 1 | 1

If all ranks hold ranges of one size, this is `S(d)` of a layout.  With fewer key heads than ranks,
several ranks hold the same range, and its gradient is the sum of theirs.  If a weight packs keys
with queries, these ranks have that range in common, and their other ranges differ.

    balanced    5 1 1 1 1 5  in 3 parts     5 | 1 1 1 1 | 5       contiguous parts
    owners      a5 b4 c3 d2  on 2 ranks     a, d | b, c           named weights over ranks
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwise.core.errors import bad

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
        return len(self.ranges)

    def size(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.ranges[rank])

    def holders(self, rank: int) -> tuple[int, ...]:
        return tuple(r for r, ranges in enumerate(self.ranges) if ranges == self.ranges[rank])

    @property
    def shared(self) -> bool:
        return any(len(self.holders(rank)) > 1 for rank in range(self.ranks))

    def common(self, rank: int) -> dict[tuple[int, ...], list[tuple[int, int]]]:
        """Common spans (start on `rank`, length) of ranks whose other ranges differ, by ranks."""
        found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        offset = 0
        for start, stop in self.ranges[rank]:
            holders = tuple(r for r, ranges in enumerate(self.ranges) if (start, stop) in ranges)
            if len(holders) > 1 and holders != self.holders(rank):
                found.setdefault(holders, []).append((offset, stop - start))
            offset += stop - start
        return found

    def on(self, dim: int) -> "Cut":
        return Cut(dim, self.whole, self.ranges)

    def shape(self, whole: Sequence[int], rank: int) -> tuple[int, ...]:
        return (*whole[: self.dim], self.size(rank), *whole[self.dim + 1 :])

    def full_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        return (*local[: self.dim], self.whole, *local[self.dim + 1 :])

    def spans(self, rank: int, low: int, high: int) -> list[tuple[int, int, int]]:
        """[low, high) of the dim on `rank` as (start there, start in the full dim, length)."""
        found: list[tuple[int, int, int]] = []
        offset = 0
        for start, stop in self.ranges[rank]:
            first, last = max(low, offset), min(high, offset + stop - start)
            if first < last:
                found.append((first, start + first - offset, last - first))
            offset += stop - start
        return found


def even(dim: int, whole: int, ranks: int) -> Cut:
    return Cut(dim, whole, _balanced(whole, ranks))


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
    With fewer key heads than ranks, several share one and divide its queries (arXiv 2305.13245).
    Raises ValueError if a rank would have no query head, or `keys` does not divide `queries`.
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
    return Cut(dim, cut.whole * width, tuple(_times(mine, width) for mine in cut.ranges))


def _balanced(count: int, ranks: int) -> tuple[tuple[Range, ...], ...]:
    edges = [count * rank // ranks for rank in range(ranks + 1)]
    return tuple(((edges[r], edges[r + 1]),) for r in range(ranks))


def _times(ranges: tuple[Range, ...], width: int) -> tuple[Range, ...]:
    return tuple((start * width, stop * width) for start, stop in ranges)


# --- lengths of sharded sequences -----------------------------------------------------------------


class Lengths:
    """The lengths of the sequences of one pass, sharded over `ranks` ranks, by the size of a shard.
    Shards are padded to one size on all ranks, and two lengths get shards of two sizes: on 2 ranks,
    8 positions have shards of 4; 7 positions then have shards of 5.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.known: dict[int, int] = {}  # size of a shard -> positions of the sequence

    def shard(self, whole: int) -> int:
        size = -(-whole // self.ranks)
        while self.known.setdefault(size, whole) != whole:
            size += 1
        return size

    def full(self, shard: int) -> int:
        """The length of the sequence whose shards have this size. Raises InputError if none has."""
        if shard in self.known:
            return self.known[shard]
        known = ", ".join(f"{size} of {whole}" for size, whole in self.known.items()) or "none"
        raise bad(
            f"a tensor of {shard} positions that is no shard of a sequence (shards in this pass: "
            f"{known})",
            "shards as input of colwise and gather modules; a replicated tensor must be a further "
            "argument of a gather module",
            '"name": "gather" for the block that uses both, in sequence={...}',
        )


# --- balanced partitions --------------------------------------------------------------------------


def balanced(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """The start of each part except the first; of equally good partitions, the earliest starts.
    No part is empty.  Exact: a dynamic program over suffixes, in parts * n**2 steps.
    """
    n = len(weights)
    sums = [0.0, *accumulate(weights)]
    # least[k][i]: the smallest possible heaviest part of weights[i:] in k + 1 parts
    least = [[sums[n] - sums[i] for i in range(n)]]
    for k in range(1, parts):
        row = [
            min(
                (max(sums[j] - sums[i], least[-1][j]) for j in range(i + 1, n - k + 1)),
                default=float("inf"),
            )
            for i in range(n)
        ]
        least.append(row)
    cuts: list[int] = []
    limit, i = least[parts - 1][0], 0
    for left in range(parts - 1, 0, -1):
        fits = (j for j in range(i + 1, n - left + 1) if sums[j] - sums[i] <= limit)
        i = next(j for j in fits if least[left - 1][j] <= limit)
        cuts.append(i)
    return tuple(cuts)


def owners(weights: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The rank of each name: the heaviest first, each to the rank with the least so far."""
    loads, found = [0] * min(ranks, len(weights)), dict[str, int]()
    for name in sorted(weights, key=lambda name: (-weights[name], name)):
        found[name] = loads.index(min(loads))
        loads[found[name]] += weights[name]
    return found
