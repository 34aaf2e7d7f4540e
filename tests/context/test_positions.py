"""Which positions each rank of the axis `cp` holds."""

import pytest
import torch

from shardwise.techniques.context.cut_batch import shard
from shardwise.techniques.context.positions import SequenceCut, visible
from tests.context.cases import unshard


def test_zigzag():
    """A rank holds an early and a late chunk, as in the figure of the module."""
    cut = SequenceCut(16, 4, zigzag=True)
    assert [cut.chunks(rank) for rank in range(4)] == [
        [(0, 2), (14, 16)],
        [(2, 4), (12, 14)],
        [(4, 6), (10, 12)],
        [(6, 8), (8, 10)],
    ]


def test_ulysses_inside_a_ring():
    """The positions of a ring rank, in its order, are divided into blocks."""
    cut = SequenceCut(16, 4, zigzag=True, ulysses=2)
    assert [cut.chunks(rank) for rank in range(4)] == [
        [(0, 4)],
        [(12, 16)],
        [(4, 8)],
        [(8, 12)],
    ]


CUTS = [
    SequenceCut(length, ranks, zigzag, ulysses)
    for length in (1, 2, 3, 13, 16)
    for ranks in (1, 2, 4)
    for zigzag in (True, False)
    for ulysses in (1, 2, 4)
    if ranks % ulysses == 0
]


@pytest.mark.cases(len(CUTS))
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_position_is_on_one_rank(cut: SequenceCut):
    """Chunks, and ranks, differ by at most one position; the shards make the whole."""
    x = torch.arange(cut.length).expand(2, -1)
    pieces = [shard(x, cut, rank, 1) for rank in range(cut.ranks)]
    assert [piece.shape[1] for piece in pieces] == [cut.numel(rank) for rank in range(cut.ranks)]
    assert torch.cat(pieces, 1)[0].sort().values.tolist() == list(range(cut.length))
    assert torch.equal(unshard(pieces, cut, 1), x)
    sizes = [stop - start for r in range(cut.ring.ranks) for start, stop in cut.ring.chunks(r)]
    for counts in (sizes, [piece.shape[1] for piece in pieces]):
        assert max(counts) - min(counts) <= 1


@pytest.mark.cases(len(CUTS))
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_visible(cut: SequenceCut):
    """Between two ring ranks causal attention is all of the visible part, and nothing else."""
    cut, position = cut.ring, torch.arange(cut.length)
    for rank in range(cut.ranks):
        for source in set(range(cut.ranks)) - {rank}:
            rows, keys = (shard(position, cut, r, 0) for r in (rank, source))
            first, stop = visible(cut, rank, source)
            part = torch.zeros(len(rows), len(keys), dtype=torch.bool)
            part[first:, :stop] = True
            assert torch.equal(part, rows[:, None] >= keys)
