"""Rendezvous from the environment: the rank of this process, and the address where all ranks meet.

    torchrun   RANK, WORLD_SIZE, LOCAL_RANK; the ranks meet at MASTER_ADDR and MASTER_PORT
    Slurm      SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID; the ranks meet on the first host
               of the step, at a port computed from the job's number

A Slurm batch script has SLURM_PROCID too, though it is a single process.  Only a process started by
srun has SLURM_STEP_NUM_TASKS, so that variable decides.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.core.errors import bad

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
#: Our launcher sets this variable to its own pid in the ranks it starts.
LAUNCHER = "SHARDWISE_LAUNCHER"
#: Ports for Slurm jobs: above registered services, below the ephemeral ports of clients.
_PORTS = range(15000, 32000)


@dataclass(frozen=True)
class Start:
    """The rank a process was started as.

    `address` is where the ranks meet, as an init_method of torch.distributed; None for one rank.
    """

    rank: int
    size: int
    local_rank: int
    address: str | None


def environment(variables: Mapping[str, str] | None = None) -> Start | None:
    """Read the environment that torchrun or Slurm sets; None if neither started this process.

    `variables` defaults to the environment of the process.

    Raises:
        InputError: a variable is missing or not a number, or variables contradict each other.
    """
    variables = os.environ if variables is None else variables
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _torchrun(variables)
    if "SLURM_STEP_NUM_TASKS" in variables and "SLURM_PROCID" in variables:
        return _slurm(variables)
    return None


def launched(variables: Mapping[str, str] | None = None) -> bool:
    """Whether our own launcher started this process and watches it."""
    return (os.environ if variables is None else variables).get(LAUNCHER) == str(os.getppid())


def local_rank(rank: int, variables: Mapping[str, str] | None = None) -> int:
    """The rank within this host, from the environment; `rank` itself if the environment has none.

    For processes that initialised torch.distributed themselves.
    """
    variables = os.environ if variables is None else variables
    texts = [variables.get(name, "") for name in ("LOCAL_RANK", "SLURM_LOCALID")]
    return next((int(text) for text in texts if text.isdecimal()), rank)


def _torchrun(variables: Mapping[str, str]) -> Start:
    missing = [name for name in _TORCHRUN if not variables.get(name)]
    if missing:
        present = " and ".join(name for name in _TORCHRUN if variables.get(name))
        raise bad(
            f"{present or 'empty RANK'} in the environment without {' and '.join(missing)}",
            f"all of {', '.join(_TORCHRUN)}, or none of them",
            "start with 'torchrun --nproc-per-node 2 -m shardwise ...', or unset them",
        )
    rank, size = _rank_and_size(variables, "RANK", "WORLD_SIZE")
    local = _number(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else rank
    return Start(rank, size, local, "env://")


def _slurm(variables: Mapping[str, str]) -> Start:
    rank, size = _rank_and_size(variables, *_SLURM)
    local = _number(variables, "SLURM_LOCALID") if "SLURM_LOCALID" in variables else rank
    if size == 1:
        return Start(rank, size, local, None)
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    if not hosts:
        raise bad(
            f"a Slurm step of {size} tasks without SLURM_STEP_NODELIST",
            "the list of the step's nodes, which srun sets",
            "srun --ntasks 2 --export=ALL ...",
        )
    if variables.get("MASTER_PORT"):
        port = _number(variables, "MASTER_PORT")
    else:
        step = int(re.sub(r"\D", "", variables.get("SLURM_STEP_ID", "")) or 0)
        job = int(re.sub(r"\D", "", variables.get("SLURM_JOB_ID", "")) or 0)
        port = _PORTS[(job * 7 + step) % len(_PORTS)]  # 7: the steps of near jobs stay apart
    return Start(
        rank, size, local, f"tcp://{variables.get('MASTER_ADDR') or first_host(hosts)}:{port}"
    )


def first_host(hosts: str) -> str:
    """The first name of Slurm's compressed list: 'gpu[007-012,020],cpu1' -> 'gpu007'."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", hosts)
    if match is None:
        raise bad(f"the node list '{hosts}'", "names like 'gpu[007-012]'", "export MASTER_ADDR=...")
    return "".join(part or "" for part in match.groups())


def _rank_and_size(variables: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _number(variables, rank_name), _number(variables, size_name)
    if rank >= size:
        raise bad(
            f"{rank_name}={rank} and {size_name}={size} in the environment",
            "ranks from 0 to one less than the size",
            f"export {rank_name}={max(size - 1, 0)}, or unset both for a world of one",
        )
    return rank, size


def _number(variables: Mapping[str, str], name: str) -> int:
    if not variables[name].isdecimal():
        raise bad(
            f"{name}='{variables[name]}' in the environment",
            "a whole number from 0 up",
            f"unset {name}, or start with torchrun",
        )
    return int(variables[name])
