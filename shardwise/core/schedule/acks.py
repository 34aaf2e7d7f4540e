"""Implicit acknowledgements: received messages that prove that an earlier send has arrived.

    rank 0   SEND:act0.0>1 ................ RECV:grad1.0<1     grad1.0 was sent by a rank that
    rank 1   RECV:act0.0<0 F1.0 B1.0 SEND:grad1.0>0            had received act0.0 before

A rank that sends without waiting must keep the tensor until it has arrived.  An acknowledgement
proves that, and costs no message.  Sends without one are waited for at the end of the schedule.
"""

from shardwise.core.schedule.action import Token, Transfer
from shardwise.core.schedule.schedule import Schedule


def acks(schedule: Schedule, rank: int) -> dict[Token, tuple[Token, ...]]:
    """For each token that `rank` receives, the tokens it sent whose arrival this newly proves.

    `schedule` must be lowered.
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
