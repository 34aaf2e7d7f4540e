"""Hosts and processes: which processes share a host, and whether a process is alive."""

import os
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """The state of a process on this host, from /proc/PID/stat."""

    state: str  # a letter of proc(5); "X" if the process is gone, "?" if the state is unknown
    cpu_s: float  # processor time used so far
    started: int  # start time, in clock ticks since boot


def process(pid: int) -> Process:
    """Read the state of process `pid`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return Process("X" if Path("/proc/self/stat").exists() else "?", 0.0, 0)
    except OSError:
        return Process("?", 0.0, 0)
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Process(fields[0], cpu_s, int(fields[19]))


def host_number() -> int:
    """A number shared by all processes with the same memory, network and pids; 0 if unknown.

    Ranks in separate network namespaces get different numbers, because a benchmark of a link
    treats them as separate hosts.
    """
    scope = _scope("net", "pid")
    return int.from_bytes(blake2b(scope.encode(), digest_size=7).digest(), "big") if scope else 0


def identity(pid: int) -> str:
    """A text that no other process ever has: pid, start time, boot and pid namespace."""
    return f"{pid} {process(pid).started} {_scope('pid')}"


def is_dead(known: str) -> bool:
    """Whether the process with this `identity` has ended.  False for a process of another host."""
    pid, _, scope = [*known.split(maxsplit=2), "", "", ""][:3]
    if not scope or scope != _scope("pid"):
        return False
    return identity(int(pid)) != known or process(int(pid)).state in "XZ"


def _scope(*namespaces: str) -> str:
    """The boot id and the inode numbers of this process's namespaces; "" where /proc has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        inodes = [str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in namespaces]
    except OSError:
        return ""
    return " ".join([boot, *inodes])
