"""The lengths of sharded sequences, identified by the size of a shard.

    2 ranks     8 positions ---> shards of 4
                7 positions ---> shards of 5, because 4 belongs to 8 positions

Shards are padded to one size on all ranks, so two lengths could have shards of the same size.  In
one pass, sequences of different lengths therefore get shards of different sizes.
"""

from shardwise.core.errors import bad


class Lengths:
    """The lengths of the sequences of one pass, sharded over `ranks` ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.known: dict[int, int] = {}  # size of a shard -> positions of the sequence

    def shard(self, whole: int) -> int:
        """The size of a shard of a sequence of `whole` positions."""
        size = -(-whole // self.ranks)
        while self.known.setdefault(size, whole) != whole:
            size += 1
        return size

    def full(self, shard: int) -> int:
        """The number of positions of the sequence whose shards have this size.

        Raises InputError for a size that no shard in this pass has.
        """
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
