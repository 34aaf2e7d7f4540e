"""How many processes may be started on this machine."""

import os
from typing import Final

from shardwise.core.errors import bad

#: The limit is the larger of these: per machine, and per processor core.
PER_MACHINE: Final = 64
PER_CORE: Final = 8


def require_local(ranks: int) -> None:
    """Raise InputError if `ranks` is surely a mistake for this machine."""
    cores = os.cpu_count() or 1
    most = max(PER_MACHINE, PER_CORE * cores)
    if ranks > most:
        raise bad(
            f"{ranks} processes on this machine, which has {cores} processor cores",
            f"up to {most} processes here, and more on several machines with torchrun",
            "fewer ranks, such as dp2",
        )


def require_cores(ranks: int, plan: str) -> None:
    """Raise InputError if a plan needs more processes than cores and --nproc was not given.

    This keeps a plan for a cluster from starting on a laptop by accident.
    """
    cores = os.cpu_count() or 1
    if ranks > cores:
        raise bad(
            f"the plan '{plan}', which needs {ranks} processes, on a machine with {cores} "
            f"processor core{'s' * (cores > 1)}",
            f"up to {cores} processes without --nproc, and more with it",
            f"--nproc {ranks}",
        )
