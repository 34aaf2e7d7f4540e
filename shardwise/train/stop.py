"""Agreement of the ranks to stop after a step, once one of them has received a signal.

A signal may reach ranks in different steps, or only one rank. All ranks must stop after the same
step, or some would wait forever in the next step's collectives. So after each step they all-reduce
their flags: one byte per rank, counted in the ledger under the phase `check`.
"""

import torch

from shardwise.comm.move import all_reduce
from shardwise.comm.world import World


def any_rank(flag: bool, world: World) -> bool:
    """Whether the flag is set on at least one rank; the same result on all ranks."""
    return bool(ranks_with(flag, world))


def stops_and_fails(stop: bool, failed: bool, world: World) -> tuple[bool, bool]:
    """Whether each flag is set on at least one rank: the same on all ranks, in one message."""
    flags = _numbers(stop + 2 * failed, world)
    return any(flag & 1 for flag in flags), any(flag & 2 for flag in flags)


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
