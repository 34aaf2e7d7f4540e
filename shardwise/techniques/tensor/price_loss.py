"""The bytes of a cross-entropy over a vocabulary sharded over ranks.

For N positions there are two all-reduces: of the largest logit, N elements; of the sum of
exponentials and the target's logit, 2N, or 3N with label smoothing, which also needs the sum of the
logits. The bytes do not depend on the size of the vocabulary, and the backward pass sends nothing.
(Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3.)
"""

from shardwise.core.layout import P, R
from shardwise.core.moves import price


def loss_bytes(
    positions: int, ranks: int, *, smoothing: bool = False, element_bytes: int = 4
) -> int:
    """The bytes that each of `ranks` ranks sends for one cross-entropy of `positions` positions.

    `positions` include ignored ones. `element_bytes` is 8 for logits in fp64, and 4 for all others,
    because the sums of 16-bit logits are in fp32.
    """
    calls = (positions, (3 if smoothing else 2) * positions)
    return sum(round(price(P, R, numel, ranks).sent) for numel in calls) * element_bytes
