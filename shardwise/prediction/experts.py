"""The bytes that layers of experts send in a step, given the counts of their tokens.

Of an exchange of rows, rank r of n sends all but its own rows, and as many bytes come back in the
backward pass as came in the forward pass:

    forward     dispatch: sent - sent[r]         combine: received - received[r]
    backward    dispatch: received - received[r] combine: sent - sent[r]

With an even load of N tokens with k choices of width D, each of the four is N k D (n-1)/n.
"""

from collections.abc import Sequence

from shardwise.core.expert_moves import ExpertMove
from shardwise.core.layout import P, R, S
from shardwise.core.moves import counts_price
from shardwise.core.plan import Plan
from shardwise.prediction.traffic import Line, Tariff


def expert_bytes(plan: Plan, rank: int, moves: Sequence[ExpertMove]) -> dict[Line, int]:
    """The bytes `rank` sends for these moves, by axis, kind and phase."""
    tariff, data = Tariff(plan, rank), list(plan.data_axes)
    for one in moves:
        numel, size = one.numel, one.element_bytes
        if one.kind == "gather":
            for axis in reversed(data):
                numel *= tariff.size(axis)
                tariff.move(axis, S(0), R, numel, size, one.phase)
        elif one.kind == "sum":
            for axis in data:
                tariff.move(axis, P, R, numel, size, one.phase)
            for axis in data * one.returns:
                tariff.move(axis, P, R, numel, size, "backward")
        else:
            sent, received = (counts_price(c, one.rank) for c in (one.sent, one.received))
            tariff.add(Line("ep", "all_to_all", one.phase), sent * size)
            tariff.add(Line("ep", "all_to_all", "backward"), received * size * one.returns)
    return tariff.sent_bytes
