"""The kernel's byte counters of a network interface, and network namespaces to measure in.

These counters check every other count, Shardwise's own ledger included.  /proc/net/dev counts
packet headers too, about a thousandth of a large message, and the traffic of every program in the
network namespace.  A process in its own namespace (this needs root, or user namespaces) has a
loopback interface that no other program uses.
"""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from shardwise.core.errors import bad

COUNTERS: Final = Path("/proc/net/dev")
LOOPBACK: Final = "lo"
SENT, PACKETS = 8, 9  # of a line's numbers: bytes transmitted, packets transmitted

SET_FLAGS: Final = 0x8914  # SIOCSIFFLAGS of <linux/sockios.h>
UP_RUNNING: Final = 0x1 | 0x40  # IFF_UP, IFF_RUNNING of <linux/if.h>


class Sent(NamedTuple):
    """Bytes (headers included) and packets sent through an interface."""

    sent_bytes: int
    packets: int


def sent(interface: str) -> Sent:
    """The counters of `interface` since it was created, in this network namespace.

    Raises InputError if the interface does not exist, or the system is not Linux.
    """
    lines = COUNTERS.read_text().splitlines() if COUNTERS.exists() else []
    for line in lines:
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            found = numbers.split()
            return Sent(int(found[SENT]), int(found[PACKETS]))
    names = [line.partition(":")[0].strip() for line in lines if ":" in line]
    raise bad(
        f'the network interface "{interface}"',
        f"an interface with counters: {', '.join(names) or 'none, as this is not Linux'}",
        f"{names[0] if names else 'the same command on Linux'}",
    )


def sent_bytes(interface: str) -> int:
    """The bytes of `sent`."""
    return sent(interface).sent_bytes


def namespace_prefix() -> list[str]:
    """A command prefix that runs a command in a new network namespace; empty if not permitted."""
    for options in (["--net"], ["--net", "--map-root-user"]):
        prefix = ["unshare", *options, "--"]
        if shutil.which("unshare") and _succeeds([*prefix, "true"]):
            return prefix
    return []


def _succeeds(line: Sequence[str]) -> bool:
    return subprocess.run(line, capture_output=True, check=False).returncode == 0  # noqa: S603


def bring_up_loopback() -> None:
    """Switch the loopback interface on.  In a new namespace it is off."""
    request = struct.pack("16sh14x", LOOPBACK.encode(), UP_RUNNING)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, request)


def on_loopback(statement: str, arguments: Sequence[str], prefix: Sequence[str]) -> str:
    """Run `python -c statement arguments` with its ranks on the loopback interface.

    Returns the last lines of its error output.
    """
    settings = {"GLOO_SOCKET_IFNAME": LOOPBACK, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    line = [*prefix, sys.executable, "-c", statement, *arguments]
    ended = subprocess.run(  # noqa: S603
        line, env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    return "\n".join(ended.stderr.splitlines()[-20:])
