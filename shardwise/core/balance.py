"""Balanced partitions of weights: of a list into contiguous parts, and of named ones over ranks.

balanced    5 1 1 1 1 5  in 3 parts     5 | 1 1 1 1 | 5
owners      a5 b4 c3 d2  on 2 ranks     a, d | b, c
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate


def balanced(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """The start of each part except the first; of equally good partitions, the earliest starts.

    No part is empty. `parts` is from 1 to n. Exact: a dynamic program over suffixes, in
    parts * n**2 steps.
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
