"""The memory of a host: what its processes may use, and what is free of it.

A container or a job of a batch system has a limit of its own, in the files of control groups
(version 2, then version 1); so may the groups around it. The
cache of files that it has read counts as used there, and is free for whoever needs it.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")
#: The files with the limit, the use, and the counts of which one is the cache of files.
_FILES: Final = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"),
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


def _limits(groups: Path = _GROUPS, own: Path = _OWN) -> list[tuple[int, int]]:
    """The limit and the use of each control group that has a limit, in bytes, without the cache."""
    found: list[tuple[int, int]] = []
    for folder, (limit, used, counts, cache) in _groups_of(groups, own):
        if not all((folder / name).exists() for name in (limit, used, counts)):
            continue
        text = (folder / limit).read_text().strip()
        lines = map(str.split, (folder / counts).read_text().splitlines())
        cached = sum(int(line[1]) for line in lines if line[0] == cache)
        if text.isdecimal():
            found.append((int(text), max(0, int((folder / used).read_text()) - cached)))
    return found


def _groups_of(groups: Path, own: Path) -> Iterator[tuple[Path, tuple[str, str, str, str]]]:
    """The control groups of this process, a batch system's too, with the names of their files."""
    lines = own.read_text().splitlines() if own.exists() else []
    for root, kind, files in ((groups, "", _FILES[0]), (groups / "memory", "memory", _FILES[1])):
        paths = (line.split(":", 2) for line in lines)
        inside = [path for _, kinds, path in paths if kind in kinds.split(",")]
        folder = root / (inside[0].lstrip("/") if inside else "")
        for each in dict.fromkeys((folder, *folder.parents, root)):
            if each.is_relative_to(root):
                yield each, files
