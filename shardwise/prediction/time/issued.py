"""What a rank issues in a step, in order, as a dry run records it (observe/step_bytes.py).

kernels     on the stream that computes
messages    and copies between tiers, each on the stream of its axis; and the waits for them
actions     of the schedule, each where it is over; the rest of a step follows the last
"""

from typing import NamedTuple

from shardwise.core.schedule.schedule import Action
from shardwise.core.tally import Key


class Operation(NamedTuple):
    """A kernel.

    dtype        of its largest input, by torch's name
    flops        of a product, as torch's FlopCounterMode counts
    done_flops   what the kernel computes: causal attention computes half of `flops`
    moved_bytes  of the tensors that it reads and writes
    backward     in a backward pass
    again        in a recomputation
    """

    dtype: str
    flops: int
    done_flops: int
    moved_bytes: int
    backward: bool = False
    again: bool = False


class Begun(NamedTuple):
    """A message or a copy begins, of so many bytes that this rank sends."""

    number: int
    key: Key
    sent_bytes: int


class Waited(NamedTuple):
    """What follows needs the message or copy of this number."""

    number: int


Issued = Operation | Begun | Waited | Action
