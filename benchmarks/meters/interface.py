"""The kernel's byte counters of a network interface.

These counters check every other count, Shardwise's own ledger included.  /proc/net/dev counts
packet headers too, about a thousandth of a large message, and the traffic of every program in the
network namespace.
"""

from pathlib import Path
from typing import Final, NamedTuple

from shardwise.core.errors import bad

COUNTERS: Final = Path("/proc/net/dev")
LOOPBACK: Final = "lo"
SENT, PACKETS = 8, 9  # of a line's numbers: bytes transmitted, packets transmitted


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
