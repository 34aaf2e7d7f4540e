"""this file is the receipts of a schedule: which message proves that another has arrived.

    rank 0   SEND:act0.0>1 ................ RECV:grad1.0<1     grad1.0 was sent by a rank that
    rank 1   RECV:act0.0<0 F1.0 B1.0 SEND:grad1.0>0            had received act0.0 before

Whoever sends without waiting must keep what it sends until it is there.  A receipt tells it so, and
costs nothing.  What no message proves is waited for at the end.
"""

from shardwise.core.schedule.action import Token, Transfer
from shardwise.core.schedule.schedule import Schedule


def receipts(schedule: Schedule, rank: int) -> dict[Token, tuple[Token, ...]]:
    """For tokens that `rank` receives: those it sent whose arrival is proved, and was not before.

    `schedule` is lowered.
    """
    row = schedule.rows[rank]
    peers = {step.peer for step in row if isinstance(step, Transfer) and step.op == "RECV"}
    found: dict[Token, tuple[Token, ...]] = {}
    for peer in peers:
        got: list[Token] = []
        for step in schedule.rows[peer]:
            if not isinstance(step, Transfer) or step.peer != rank:
                continue
            if step.op == "RECV":
                got.append(step.token)
            else:
                found[step.token], got = tuple(got), []
    return found
