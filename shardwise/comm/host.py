"""Which host a process is on."""

from hashlib import blake2b
from pathlib import Path


def host_number() -> int:
    """A number that processes have in common if they share memory, processes and network.

    0 where that is not known.  Ranks in network namespaces of their own are on hosts of their own
    to whoever measures a link.
    """
    try:
        told: list[object] = [Path("/proc/sys/kernel/random/boot_id").read_text()]
        told += [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("net", "pid")]
    except OSError:
        return 0
    return int.from_bytes(blake2b(repr(told).encode(), digest_size=7).digest(), "big")
