"""How long sequences are of which ranks hold shards, told by the size of a shard.

    2 ranks     8 positions ---> shards of 4
                7 positions ---> shards of 5: 4 are those of 8 already

A shard is padded to the size that it has on every rank, so that its size alone does not tell how
long the whole is.  Sequences that are met together and are not as long have shards of other sizes.
"""

from shardwise.core.errors import bad


class Lengths:
    """The sequences of one pass, split over so many ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.known: dict[int, int] = {}  # by the size of a shard, of how many positions

    def shard(self, whole: int) -> int:
        """The size of a shard of a sequence of `whole` positions."""
        size = -(-whole // self.ranks)
        while self.known.setdefault(size, whole) != whole:
            size += 1
        return size

    def whole(self, shard: int) -> int:
        """The positions of the sequence whose shards have this size.

        Raises InputError for a size that no shard in this pass has.
        """
        if shard in self.known:
            return self.known[shard]
        known = ", ".join(f"{size} of {whole}" for size, whole in self.known.items()) or "none"
        raise bad(
            f"a tensor of {shard} positions where sp has a shard of a sequence (in this pass: "
            f"{known})",
            "columns and gather that read shards; what is whole on every rank is a further "
            "argument of a module with the entry gather",
            '"name": "gather" for the block that reads both, in sequence={...}',
        )
