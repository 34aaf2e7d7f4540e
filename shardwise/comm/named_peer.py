"""Errors of messages between ranks: which rank, which call, and where this rank made it.

Gloo's own errors name a socket.  Each rank whose message fails raises one that names the rank at
the other end, so both ends are told.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardwise.comm.ledger import Line
from shardwise.comm.start.call_stack import place


def rank_name(group: dist.ProcessGroup, peer: int) -> str:
    """`rank 3`: the rank of the world that is number `peer` of the group."""
    try:
        return f"rank {dist.get_global_rank(group, peer)}"
    except (KeyError, RuntimeError, ValueError):  # the group is not, or no longer, registered
        return f"rank {peer} of the group"


def call_name(line: Line) -> str:
    """The call of this rank that the line counts, and its place."""
    kind = f"{line.kind} on axis {line.axis}" if line.kind else "a message"
    return f"{kind}, called by {place()}"


@contextmanager
def naming(group: dist.ProcessGroup, peer: int | None, line: Line) -> Iterator[None]:
    """Name the call, and the rank at the other end, in an error of gloo."""
    try:
        yield
    except RuntimeError as error:
        whom = "one of the ranks" if peer is None else rank_name(group, peer)
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise RuntimeError(
            f"the connection to {whom} failed in {call_name(line)}. That rank has ended or "
            f"failed: its own error says why ({why})"
        ) from error
