"""This file is the wire as the kernel counts it: bytes that left through a network interface.

Nobody's own accounting is believed: not the peers', not Shardwise's ledger. The counters of
/proc/net/dev include the headers of the packets, about a thousandth of a large message.
"""

from pathlib import Path
from typing import Final

from shardwise.core.errors import bad

COUNTERS: Final = Path("/proc/net/dev")
SENT: Final = 8  # the ninth number of a line: bytes transmitted


def sent_bytes(interface: str) -> int:
    """Bytes that have left through `interface` since it exists, in this network namespace.

    Raises InputError where there is no such interface or the system does not count (not Linux).
    """
    lines = COUNTERS.read_text().splitlines() if COUNTERS.exists() else []
    for line in lines:
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[SENT])
    names = [line.partition(":")[0].strip() for line in lines if ":" in line]
    raise bad(
        f'the network interface "{interface}"',
        f"an interface with counters: {', '.join(names) or 'none, as this is not Linux'}",
        f"{names[0] if names else 'the same command on Linux'}",
    )
