"""The memory of a host: what its processes may use, and what is free of it.

A container has a limit of its own, in the files of control groups (version 2, then version 1).
"""

import math
from pathlib import Path
from typing import Final

_GROUPS: Final = Path("/sys/fs/cgroup")
_LIMITS: Final = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def limit_bytes(memory_bytes: int) -> int:
    """The memory that processes may use: the machine's, or the limit of its container."""
    return min([memory_bytes, *(limit for limit, _ in _limits())])


def free_bytes() -> float:
    """The memory of this host that is free; infinity if the system does not say."""
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.exists() else []
    free = [int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable")]
    return min([math.inf, *free, *(limit - used for limit, used in _limits())])


def _limits() -> list[tuple[int, int]]:
    """The limit and the use of each control group that has a limit, in bytes."""
    texts = [
        tuple(file.read_text().strip() for file in (_GROUPS / own, _GROUPS / used))
        for own, used in _LIMITS
        if (_GROUPS / own).exists() and (_GROUPS / used).exists()
    ]
    return [(int(own), int(used)) for own, used in texts if own.isdecimal()]
