"""The bytes of a cross-entropy over a vocabulary that ranks share.

For N positions each rank sends what three all-reduces would, in two calls: of the largest logit,
N elements; of the sum of exponentials and the target's logit, 2N, or 3N with label smoothing,
which needs the sum of the logits too. Nothing depends on the size of the vocabulary, and the
backward pass sends nothing. (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3.)
"""

from shardwise.core.layout import P, R
from shardwise.core.moves import price


def loss_bytes(
    positions: int, ranks: int, *, smoothing: bool = False, element_bytes: int = 4
) -> int:
    """The bytes each of `ranks` sends for one cross-entropy of so many positions.

    `positions` are all, the ignored ones included. `element_bytes` is 8 for logits in fp64, and 4
    for all others, 16-bit ones too: their sums are taken in fp32.
    """
    calls = (positions, (3 if smoothing else 2) * positions)
    return sum(round(price(P, R, numel, ranks).sent) for numel in calls) * element_bytes
