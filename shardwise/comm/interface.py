"""The network interface as the kernel counts it, and a network namespace to count alone in.

Nobody's own accounting is believed: not the peers', not Shardwise's ledger.  The counters of
/proc/net/dev include the headers of the packets, about a thousandth of a large message, and the
traffic of every other program of this network namespace.  A process in a namespace of its own,
which takes root or a system that lets users make them, has a loopback interface that nobody else
uses.
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
    """What has left through an interface: bytes, headers included, and packets."""

    sent_bytes: int
    packets: int


def sent(interface: str) -> Sent:
    """What has left through `interface` since it exists, in this network namespace.

    Raises InputError where there is no such interface or the system does not count (not Linux).
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
    """The words before a command that give it a network namespace; none where it is not allowed."""
    for options in (["--net"], ["--net", "--map-root-user"]):
        prefix = ["unshare", *options, "--"]
        if shutil.which("unshare") and _succeeds([*prefix, "true"]):
            return prefix
    return []


def _succeeds(line: Sequence[str]) -> bool:
    return subprocess.run(line, capture_output=True, check=False).returncode == 0  # noqa: S603


def bring_up_loopback() -> None:
    """Switch the loopback interface on; that of a new namespace is off."""
    request = struct.pack("16sh14x", LOOPBACK.encode(), UP_RUNNING)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, request)


def on_loopback(statement: str, arguments: Sequence[str], prefix: Sequence[str]) -> str:
    """Run `python -c statement arguments`, whose ranks meet on the loopback interface, to its end.

    Returns the end of what it wrote to its error output.
    """
    settings = {"GLOO_SOCKET_IFNAME": LOOPBACK, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    line = [*prefix, sys.executable, "-c", statement, *arguments]
    ended = subprocess.run(  # noqa: S603
        line, env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    return "\n".join(ended.stderr.splitlines()[-20:])
