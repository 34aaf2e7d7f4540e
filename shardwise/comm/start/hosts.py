"""Hosts and processes: which processes share a host, and what a process does."""

import os
import socket
from hashlib import blake2b
from pathlib import Path
from typing import Final

#: The port that is asked, behind which usually nothing listens, and the seconds for an answer.
_DISCARD: Final = 9
_ANSWER_S: Final = 1.0


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


class Reach:
    """Which hosts can be reached: one that has answered once and does so no more is lost."""

    def __init__(self) -> None:
        self.answered: dict[str, bool] = {}

    def know(self, address: str) -> None:
        """Find out whether a host answers while it works: not behind a firewall that drops all."""
        if address and address not in self.answered:
            self.answered[address] = answers(address)

    def lost(self, address: str) -> bool:
        """Whether a host that has answered does not answer twice; takes some seconds if so."""
        return self.answered.get(address, False) and not (answers(address) or answers(address))


def answers(address: str) -> bool:
    """Whether a host accepts or refuses a connection, as any host does that is reached."""
    try:
        socket.create_connection((address, _DISCARD), _ANSWER_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def address_towards(host: str, port: int) -> str:
    """This host's address as `host` sees it; "" if that is not known, or the same host."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as towards:
            towards.connect(place)  # sends nothing
            found = str(towards.getsockname()[0])
    except OSError:
        return ""
    return "" if found.startswith("127.") or found == "::1" else found


def host_number() -> int:
    """A number shared by all processes with the same memory, network and pids; 0 if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("net", "pid")]
    except OSError:
        return 0
    scope = " ".join([boot, *spaces])
    return int.from_bytes(blake2b(scope.encode(), digest_size=7).digest(), "big")
