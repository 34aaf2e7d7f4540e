"""The ranks agree to stop, between steps, once one of them has been asked to (stop_signal.py).

A signal may reach one rank a step before another, or only one of them. The step after which the run
stops has to be the same for all, or some would wait for ever in the next step's collectives. So
after each step the ranks take the maximum of their flags: one number, counted in the ledger under
the phase `check`.
"""

import torch

from shardwise.comm.move import all_reduce
from shardwise.comm.world import World


def any_rank(flag: bool, world: World) -> bool:
    """Whether the flag is set on at least one rank; the same answer on all."""
    return bool(ranks_with(flag, world))


def ranks_with(flag: bool, world: World) -> list[int]:
    """The ranks on which the flag is set; the same list on all. One byte a rank is sent."""
    flags = torch.zeros(world.size, dtype=torch.uint8, device=world.device)
    flags[world.rank] = flag
    with world.ledger.phase("check"):
        all_reduce(flags, world.everyone)
    return flags.nonzero().flatten().tolist()
