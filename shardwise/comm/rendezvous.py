"""this file is how a process learns from its environment which rank it is, and where all meet.

    torchrun   RANK, WORLD_SIZE, LOCAL_RANK; the ranks meet at MASTER_ADDR and MASTER_PORT
    Slurm      SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID; the ranks meet on the first host
               of the step, at a port that follows from the job's number

A batch script that Slurm runs has a rank in its environment too, though it is not one of several;
only a process that srun started has SLURM_STEP_NUM_TASKS, so that is the name looked for.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.core.errors import bad

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
#: Set by our launcher, for the ranks it starts, to its own process number.
LAUNCHER = "SHARDWISE_LAUNCHER"
#: Ports for Slurm jobs: above the registered services, below what systems give to clients.
_PORTS = range(15000, 32000)


@dataclass(frozen=True)
class Start:
    """What a process was started as.

    `address` is where the ranks meet, in the form torch.distributed's init_method takes; None
    where there is nobody to meet.
    """

    rank: int
    size: int
    local_rank: int
    address: str | None


def environment(variables: Mapping[str, str] | None = None) -> Start | None:
    """What torchrun or Slurm says of this process; None where neither started it.

    `variables` are those of the process unless given.

    Raises:
        InputError: some of the variables are missing, are no numbers, or contradict each other.
    """
    given = os.environ if variables is None else variables
    if "RANK" in given or "WORLD_SIZE" in given:
        return _torchrun(given)
    if "SLURM_STEP_NUM_TASKS" in given and "SLURM_PROCID" in given:
        return _slurm(given)
    return None


def launched(variables: Mapping[str, str] | None = None) -> bool:
    """Whether our own launcher started this process, and watches it."""
    return (os.environ if variables is None else variables).get(LAUNCHER) == str(os.getppid())


def local_rank(rank: int, variables: Mapping[str, str] | None = None) -> int:
    """The rank among those of this host: what a launcher says of it; else `rank`, as on one host.

    For a process that has met the others by means of its own: nothing else is asked for.
    """
    given = os.environ if variables is None else variables
    told = [given.get(name, "") for name in ("LOCAL_RANK", "SLURM_LOCALID")]
    return next((int(text) for text in told if text.isdecimal()), rank)


def _torchrun(given: Mapping[str, str]) -> Start:
    missing = [name for name in _TORCHRUN if not given.get(name)]
    if missing:
        present = " and ".join(name for name in _TORCHRUN if given.get(name))
        raise bad(
            f"{present or 'empty RANK'} in the environment without {' and '.join(missing)}",
            f"all of {', '.join(_TORCHRUN)}, or none of them",
            "start with 'torchrun --nproc-per-node 2 -m shardwise.train.cli ...', or unset them",
        )
    rank, size = _rank_and_size(given, "RANK", "WORLD_SIZE")
    local = _number(given, "LOCAL_RANK") if "LOCAL_RANK" in given else rank
    return Start(rank, size, local, "env://")


def _slurm(given: Mapping[str, str]) -> Start:
    rank, size = _rank_and_size(given, *_SLURM)
    local = _number(given, "SLURM_LOCALID") if "SLURM_LOCALID" in given else rank
    if size == 1:
        return Start(rank, size, local, None)
    hosts = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST") or ""
    if not hosts:
        raise bad(
            f"a Slurm step of {size} tasks without SLURM_STEP_NODELIST",
            "the list of the step's nodes, which srun sets",
            "start with 'srun --ntasks 2 ...', and let it pass the environment on",
        )
    if given.get("MASTER_PORT"):
        port = _number(given, "MASTER_PORT")
    else:
        step = int(re.sub(r"\D", "", given.get("SLURM_STEP_ID", "")) or 0)
        job = int(re.sub(r"\D", "", given.get("SLURM_JOB_ID", "")) or 0)
        port = _PORTS[(job * 7 + step) % len(_PORTS)]  # 7: the steps of near jobs stay apart
    return Start(rank, size, local, f"tcp://{given.get('MASTER_ADDR') or first_host(hosts)}:{port}")


def first_host(hosts: str) -> str:
    """The first name of Slurm's compressed list: 'gpu[007-012,020],cpu1' -> 'gpu007'."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", hosts)
    if match is None:
        raise bad(f"the node list '{hosts}'", "names like 'gpu[007-012]'", "export MASTER_ADDR=...")
    return "".join(part or "" for part in match.groups())


def _rank_and_size(given: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _number(given, rank_name), _number(given, size_name)
    if rank >= size:
        raise bad(
            f"{rank_name}={rank} and {size_name}={size} in the environment",
            "ranks from 0 to one less than the size",
            f"export {rank_name}={max(size - 1, 0)}, or unset both for a world of one",
        )
    return rank, size


def _number(given: Mapping[str, str], name: str) -> int:
    if not given[name].isdecimal():
        raise bad(
            f"{name}='{given[name]}' in the environment",
            "a whole number from 0 up",
            f"unset {name}, or start with torchrun",
        )
    return int(given[name])
