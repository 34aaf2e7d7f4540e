"""This file is how many processes a machine is asked to run at most, before any is started."""

import os
from typing import Final

from shardwise.core.errors import bad

#: Processes that may be started on any machine, and for each of its processor cores.
ALWAYS: Final = 64
A_CORE: Final = 8


def require_local(ranks: int) -> None:
    """Raise InputError for more processes than this machine can be meant to run."""
    cores = os.cpu_count() or 1
    most = max(ALWAYS, A_CORE * cores)
    if ranks > most:
        raise bad(
            f"{ranks} processes on this machine, which has {cores} processor cores",
            f"up to {most} processes here; more on several machines, each started by torchrun",
            "fewer ranks, such as dp2",
        )


def require_cores(ranks: int, plan: str) -> None:
    """Raise InputError for more processes than processor cores, which nobody asked for.

    So a plan for a cluster is not started on a laptop by accident.
    """
    cores = os.cpu_count() or 1
    if ranks > cores:
        raise bad(
            f"the plan '{plan}', which needs {ranks} processes, on a machine with {cores} "
            f"processor core{'s' * (cores > 1)}",
            f"up to {cores} without --nproc, and more where --nproc asks for them",
            f"--nproc {ranks}",
        )
