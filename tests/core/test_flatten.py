"""Flattening: where parameters begin in a flat tensor, and how it is split over ranks."""

import pytest

from shardwise.core.layouts.flatten import ALIGN_BYTES, flatten


@pytest.mark.parametrize(("element_bytes", "ranks"), [(2, 1), (4, 2), (8, 3)])
def test_parameters_and_blocks_are_aligned(element_bytes: int, ranks: int):
    """Each begins at the next multiple of 64 bytes behind the one before."""
    flat = flatten([5, 64, 1, 33], element_bytes, ranks)
    starts = [*flat.offsets, *(rank * flat.share for rank in range(ranks + 1))]
    assert all(start * element_bytes % ALIGN_BYTES == 0 for start in starts)
    ends = [offset + numel for offset, numel in zip(flat.offsets, flat.numels, strict=True)]
    gaps = [(b - a) * element_bytes for a, b in zip(ends, [*starts[1:4], flat.padded], strict=True)]
    assert all(0 <= gap < ALIGN_BYTES for gap in gaps[:-1])
    assert 0 <= gaps[-1] < ALIGN_BYTES * ranks
