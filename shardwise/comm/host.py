"""Hosts and processes: which processes share a host, and what a process does."""

import os
from hashlib import blake2b
from pathlib import Path


def process(pid: int) -> tuple[str, float]:
    """The state of a process on this host, and the processor time that it has used.

    The state is a letter of proc(5); "X" if the process is gone, "?" if nothing is known.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return ("X" if Path("/proc/self/stat").exists() else "?"), 0.0
    except OSError:
        return "?", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def host_number() -> int:
    """A number shared by all processes with the same memory, network and pids; 0 if unknown.

    Ranks in separate network namespaces get different numbers, because a benchmark of a link
    treats them as separate hosts.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("net", "pid")]
    except OSError:
        return 0
    scope = " ".join([boot, *spaces])
    return int.from_bytes(blake2b(scope.encode(), digest_size=7).digest(), "big")
