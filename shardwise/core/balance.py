"""this file is how a row of weights is cut into parts so that the heaviest is as light as can be.

weights 5 1 1 1 1 5  in 3 parts     5 | 1 1 1 1 | 5
"""

from collections.abc import Sequence
from itertools import accumulate


def balanced(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Where each part but the first begins; of equally good cuts the earliest. No part is empty.

    A dynamic programme over suffixes, exact, in parts * n**2 steps. `parts` is from 1 to n.
    """
    n = len(weights)
    sums = [0.0, *accumulate(weights)]
    # least[k][i]: the heaviest part of weights[i:] in k + 1 parts, at its lightest
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
