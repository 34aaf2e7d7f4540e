"""The memory of a host: what its processes may use, and what is free of it.

A container has a limit of its own, in the files of control groups (version 2, then version 1). The
cache of files that it has read counts as used there, and is free for whoever needs it.
"""

import math
from pathlib import Path
from typing import Final

_GROUPS: Final = Path("/sys/fs/cgroup")
#: The files with the limit, the use, and the counts of which one is the cache of files.
_FILES: Final = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        *("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        *("memory/memory.stat", "total_inactive_file"),
    ),
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


def _limits(groups: Path = _GROUPS) -> list[tuple[int, int]]:
    """The limit and the use of each control group that has a limit, in bytes, without the cache."""
    found: list[tuple[int, int]] = []
    for limit, used, counts, cache in _FILES:
        if not all((groups / name).exists() for name in (limit, used, counts)):
            continue
        text = (groups / limit).read_text().strip()
        lines = map(str.split, (groups / counts).read_text().splitlines())
        cached = sum(int(line[1]) for line in lines if line[0] == cache)
        if text.isdecimal():
            found.append((int(text), max(0, int((groups / used).read_text()) - cached)))
    return found
