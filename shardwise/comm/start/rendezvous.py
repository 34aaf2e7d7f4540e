"""What the environment says of a run: this process's rank, where the ranks meet, and time limits.

    torchrun   RANK, WORLD_SIZE, LOCAL_RANK; the ranks meet at MASTER_ADDR and MASTER_PORT
    Slurm      SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID; the ranks meet on the first host
               of the step, at a port computed from the job's number

A Slurm batch script has SLURM_PROCID too, though it is a single process.  Only a process started by
srun has SLURM_STEP_NUM_TASKS, so that variable decides, and a step of one task starts no ranks.
"""

import os
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from pathlib import Path

from shardwise.core.errors import bad

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
#: Our launcher sets this variable to its own pid in the ranks it starts.
LAUNCHER = "SHARDWISE_LAUNCHER"
#: The port of the meeting, and its range.
_PORT = ("MASTER_PORT", 1, 2**16 - 1)
#: Ports for Slurm jobs: above registered services, below the ephemeral ports of clients.
_PORTS = range(15000, 32000)
#: The most processes on one machine: the larger of these, per machine and per processor core.
_PER_MACHINE, _PER_CORE = 64, 8
#: Seconds within which a host answers itself.
_ANSWER_S = 5.0
#: The variable of each time limit.
_LIMITS = {
    "start_s": "SHARDWISE_START_TIMEOUT_S",
    "frozen_s": "SHARDWISE_FROZEN_S",
    "patience_s": "SHARDWISE_PATIENCE_S",
    "save_s": "SHARDWISE_SAVE_TIMEOUT_S",
}


@dataclass(frozen=True)
class Start:
    """A rank and where all meet: `host` is "" for a world of one that needs no meeting."""

    rank: int
    size: int
    local_rank: int
    host: str = ""
    port: int = 0


@dataclass(frozen=True)
class Limits:
    """How many seconds a run waits before it reports that something is wrong.

    start_s      for all ranks to meet at the start
    frozen_s     for the next heartbeat of a rank
    patience_s   in one collective, for a rank that does not join it
    save_s       for the ranks to save and leave after a signal, before our launcher kills them
    """

    start_s: float = 60.0
    frozen_s: float = 10.0
    patience_s: float = 600.0
    save_s: float = 600.0

    @property
    def heartbeat_s(self) -> float:
        return min(1.0, self.frozen_s / 5)


def environment(variables: Mapping[str, str] = os.environ) -> Start | None:
    """Read the environment that torchrun or Slurm sets; None if neither started ranks.
    A Slurm step of one task is no launch: it is `srun --pty bash`, or the command of one process.
    """
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _torchrun(variables)
    if variables.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "SLURM_PROCID" in variables:
        return _slurm(variables)
    return None


def variables_named(names: Iterable[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def launched() -> bool:
    return os.environ.get(LAUNCHER) == str(os.getppid())


def local_rank(rank: int, variables: Mapping[str, str] = os.environ) -> int:
    """The rank within this host, of a process that initialised torch.distributed itself."""
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
    return Start(rank, size, local, variables["MASTER_ADDR"], _number(variables, *_PORT))


def _slurm(variables: Mapping[str, str]) -> Start:
    rank, size = _rank_and_size(variables, *_SLURM)
    local = _number(variables, "SLURM_LOCALID") if "SLURM_LOCALID" in variables else rank
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    if not hosts:
        raise bad(
            f"a Slurm step of {size} tasks without SLURM_STEP_NODELIST",
            "the list of the step's nodes, which srun sets",
            "srun --ntasks 2 --export=ALL ...",
        )
    if variables.get("MASTER_PORT"):
        port = _number(variables, *_PORT)
    else:
        step = int(re.sub(r"\D", "", variables.get("SLURM_STEP_ID", "")) or 0)
        job = int(re.sub(r"\D", "", variables.get("SLURM_JOB_ID", "")) or 0)
        port = _PORTS[(job * 7 + step) % len(_PORTS)]  # 7: the steps of near jobs stay apart
    return Start(rank, size, local, variables.get("MASTER_ADDR") or first_host(hosts), port)


def first_host(hosts: str) -> str:
    """The first name of Slurm's compressed list: 'gpu[007-012,020],cpu1' -> 'gpu007'."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", hosts)
    if match is None:
        raise bad(f"the node list '{hosts}'", "names like 'gpu[007-012]'", "export MASTER_ADDR=...")
    return "".join(part or "" for part in match.groups())


def _rank_and_size(variables: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    size = _number(variables, size_name, 1)
    return _number(variables, rank_name, 0, size - 1), size


def _number(variables: Mapping[str, str], name: str, least: int = 0, most: int = 2**31) -> int:
    text = variables[name]
    if text.isdecimal() and least <= int(text) <= most:
        return int(text)
    raise bad(
        f"{name}='{text}' in the environment",
        f"a whole number from {least} to {most}",
        f"unset {name}, or start with torchrun",
    )


def read_limits(variables: Mapping[str, str] = os.environ) -> Limits:
    """The limits in the environment. Raises InputError if one is no number of seconds above 0."""
    return Limits(**{field: _seconds(variables, field) for field in _LIMITS})


def _seconds(variables: Mapping[str, str], field: str) -> float:
    name, default = _LIMITS[field], getattr(Limits, field)
    text = variables.get(name) or str(default)
    with suppress(ValueError):
        if 0 < float(text) < inf:
            return float(text)
    raise bad(
        f"{name}='{text}' in the environment",
        "a number of seconds above 0",
        f"export {name}={default:.0f}, which is the default",
    )


def require_interfaces() -> None:
    """Raise InputError if GLOO_SOCKET_IFNAME names an interface that this host does not have."""
    given, here = os.environ.get("GLOO_SOCKET_IFNAME", ""), [n for _, n in socket.if_nameindex()]
    if absent := [name for name in given.split(",") if name and name not in here]:
        raise bad(
            f"GLOO_SOCKET_IFNAME={given} in the environment, and no interface {absent[0]} on "
            f"{socket.gethostname()}",
            f"interfaces of this host: {', '.join(here) or 'it has none'}",
            f"export GLOO_SOCKET_IFNAME={here[-1]}" if here else "a host with a network",
        )


def require_loopback() -> None:
    """Raise InputError if processes of this host do not reach each other by `localhost`."""
    try:
        with socket.create_server(("localhost", 0)) as server:
            socket.create_connection(server.getsockname()[:2], _ANSWER_S).close()
    except OSError as error:
        raise bad(
            f"'localhost', by which processes of this host do not reach each other ({error})",
            "a loopback interface that is up",
            "ip link set lo up",
        ) from None


def require_local(ranks: int, plan: str = "") -> None:
    """Raise InputError for far too many processes here; for a `plan`, for more than cores."""
    cores = usable_cores()
    most = cores if plan else max(_PER_MACHINE, _PER_CORE * cores)
    if ranks > most:
        what = f"the plan '{plan}', which needs " if plan else ""
        raise bad(
            f"{what}{ranks} processes on this machine, with {cores} processor cores",
            f"up to {most} processes here, and more {'with --nproc or ' * bool(plan)}on several "
            "machines with torchrun",
            f"--nproc {ranks}" if plan else "fewer ranks, such as dp2",
        )


# --- hosts and processes --------------------------------------------------------------------------


def process(pid: int) -> tuple[str, float]:
    """The state of a process, as in proc(5) ("X": gone, "?": unknown), and its CPU seconds."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return ("X" if Path("/proc/self/stat").exists() else "?"), 0.0
    except OSError:
        return "?", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def usable_cores() -> int:
    """The processor cores that this process may use: a batch system may give it some of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_number() -> int:
    """A number shared by all processes with the same memory, network and pids; 0 if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("net", "pid")]
    except OSError:
        return 0
    scope = " ".join([boot, *spaces])
    return int.from_bytes(blake2b(scope.encode(), digest_size=7).digest(), "big")
