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


def ranks_with(flag: bool, world: World) -> list[int]:
    """The ranks on which the flag is set; the same list on all ranks."""
    flags = torch.zeros(world.size, dtype=torch.uint8, device=world.device)
    flags[world.rank] = flag
    with world.ledger.phase("check"):
        all_reduce(flags, world.everyone)
    return flags.nonzero().flatten().tolist()
