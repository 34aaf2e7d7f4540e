"""Lengths of sequences by the sizes of their shards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import InputError
from shardwise.core.layouts.lengths import Lengths


@given(ranks=st.integers(2, 5), lengths=st.lists(st.integers(1, 30)))
def test_a_size_tells_the_length(ranks: int, lengths: list[int]):
    """Whatever is met with it: shards hold all of it, and its size stays while the pass goes on."""
    known = Lengths(ranks)
    sizes = {whole: known.shard(whole) for whole in lengths}
    assert all(size * ranks >= whole for whole, size in sizes.items())
    assert {known.full(size): size for size in sizes.values()} == sizes
    assert all(known.shard(whole) == size for whole, size in sizes.items())


def test_a_size_is_the_smallest_that_is_free():
    """A sequence alone is padded as little as may be."""
    known = Lengths(2)
    assert [known.shard(whole) for whole in (8, 7, 10, 8)] == [4, 5, 6, 4]


def test_what_is_no_shard_is_told():
    """A tensor that is whole, or of another pass, has no length by its size."""
    known = Lengths(2)
    known.shard(9)
    with pytest.raises(
        InputError, match=r"of 9 positions that is no shard .* in this pass: 5 of 9"
    ):
        known.full(9)
