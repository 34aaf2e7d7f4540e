"""The bytes of a cross-entropy over a cut vocabulary, worked out by hand.

That they are what is sent, tests/parallel/test_cross_entropy.py shows.
"""

import pytest

from shardwise.prediction.tensor import loss_bytes


@pytest.mark.parametrize(
    ("positions", "ranks", "smoothing", "element_bytes", "expected"),
    [
        (512, 2, False, 4, 512 * 3 * 4),  # one of the two halves each: 2 N (n-1)/n is N
        (512, 2, True, 4, 512 * 4 * 4),
        (512, 4, False, 8, (768 + 1536) * 8),
        (5, 3, False, 4, (7 + 13) * 4),  # 20/3 and 40/3 elements, each rounded
        (0, 4, True, 4, 0),
    ],
)
def test_a_loss_sends_three_or_four_numbers_a_position(
    positions: int, ranks: int, smoothing: bool, element_bytes: int, expected: int
) -> None:
    """An all-reduce of the largest logit, then one of two sums, or of three with smoothing."""
    sent = loss_bytes(positions, ranks, smoothing=smoothing, element_bytes=element_bytes)
    assert sent == expected


def test_one_rank_sends_nothing() -> None:
    """Its columns are all of them."""
    assert loss_bytes(512, 1) == 0
