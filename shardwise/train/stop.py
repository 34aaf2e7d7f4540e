"""Agreement of the ranks after a step: to stop or fail, to settle a save.

A signal may reach ranks in different steps, or only one rank. All ranks must stop after the same
step, or some would wait forever in the next step's collectives. So after each step they all-reduce
their flags: one byte per rank, counted in the ledger under the phase `check`.
"""

from dataclasses import dataclass

import torch

from shardwise.comm.move import all_reduce
from shardwise.comm.world import World


def any_rank(flag: bool, world: World) -> bool:
    """Whether the flag is set on at least one rank; the same result on all ranks."""
    return bool(ranks_with(flag, world))


@dataclass(frozen=True)
class Flags:
    """What ranks tell each other after a step, in one message.

    stop     a signal was received
    failed   a record could not be written, or a callback failed
    saved    no checkpoint is being written
    lost     a checkpoint could not be written
    """

    stop: bool
    failed: bool
    saved: bool
    lost: bool

    def agree(self, world: World) -> "Flags":
        """`saved` if it is set on all ranks, the others if on at least one; the same on all."""
        own = (self.stop, self.failed, self.saved, self.lost)
        numbers = _numbers(sum(flag << k for k, flag in enumerate(own)), world)
        bits = [[bool(number >> k & 1) for number in numbers] for k in range(len(own))]
        return Flags(any(bits[0]), any(bits[1]), all(bits[2]), any(bits[3]))


def ranks_with(flag: bool, world: World) -> list[int]:
    """The ranks on which the flag is set; the same list on all ranks."""
    return [rank for rank, found in enumerate(_numbers(flag, world)) if found]


def _numbers(own: int, world: World) -> list[int]:
    """The number of each rank, a byte; the same list on all ranks."""
    numbers = torch.zeros(world.size, dtype=torch.uint8, device=world.device)
    numbers[world.rank] = own
    with world.ledger.phase("check"):
        all_reduce(numbers, world.everyone)
    return numbers.tolist()
