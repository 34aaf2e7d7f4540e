"""The memory of a host: its limit, glibc's settings, and numbers on the way to or from a device.

A container or a job of a batch system has a limit of its own, in the files of control groups
(version 2, then version 1); so may the groups around it.  The cache of files that it has read
counts as used there, and is free for whoever needs it.

By default glibc returns freed large blocks to the kernel, and every page faults again in the next
step: 5 to 8 % of its time on a processor.  The cost of keeping them: the process stays at its peak
size.  So a run whose parameters rest on a disk, for want of memory, returns what it frees.

`HostNumbers.read` waits for the copy of its numbers alone; `torch.tensor(numbers, device=device)`,
`item` and `tolist` would wait for all queued work.
"""

import ctypes
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")
#: The files with the limit, the use, and the counts, among them the cache of files.
_FILES: Final = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"),
)


def limit_bytes(memory_bytes: int) -> int:
    return min([memory_bytes, *(limit for limit, _ in _limits())])


def free_bytes() -> float:
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


# --- settings of glibc's malloc -------------------------------------------------------------------

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 2**31 - 1
RETURNED_BYTES = 2**20  # of a block, from which on it is returned when it is freed


def keep_freed_memory() -> bool:
    """Ask glibc not to return memory to the kernel.  True if it accepted."""
    return _set(2**30, KEPT_BYTES)


def return_freed_memory() -> bool:
    return _set(RETURNED_BYTES, RETURNED_BYTES)


def _set(mmap_bytes: int, trim_bytes: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    blocks = mallopt(_M_MMAP_THRESHOLD, mmap_bytes)
    return bool(blocks and mallopt(_M_TRIM_THRESHOLD, trim_bytes))


# --- numbers between host and device --------------------------------------------------------------


def doubles_on(numbers: Sequence[float], device: torch.device) -> Tensor:
    pinned = device.type == "cuda"
    host = torch.tensor(numbers, dtype=torch.float64, device="cpu", pin_memory=pinned)
    return host.to(device, non_blocking=True)


class HostNumbers:
    """Numbers of the device, on their way to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self.copied: torch.cuda.Event | None = None
        self.numbers = numbers
        if numbers.is_cuda:
            self.numbers = numbers.to("cpu", non_blocking=True)  # pinned
            self.copied = torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(numbers.device))

    @property
    def ready(self) -> bool:
        """Whether they are on the host already, on every rank: without a GPU."""
        return self.copied is None

    def read(self) -> list[float]:
        if self.copied is not None:
            self.copied.synchronize()
        return self.numbers.tolist()
