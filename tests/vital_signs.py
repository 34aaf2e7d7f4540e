"""The vital signs of a process: what it has of the system, which must not grow with its steps."""

import os
from collections.abc import Sequence
from pathlib import Path

#: How much a process may grow between its tenth line and its last.
GROWTH_BYTES = 32 * 2**20


def vital_signs(rank: int, step: int) -> dict[str, int]:
    """This process after a step: its descriptors, threads and resident bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "pid": os.getpid(),
        "rank": rank,
        "step": step,
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
        "threads": len([*Path("/proc/self/task").iterdir()]),
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def not_flat(lines: Sequence[dict[str, int]]) -> list[str]:
    """What grew in a process after the first ten of these lines."""
    first, last = lines[10], lines[-1]
    grown = [key for key in ("descriptors", "threads") if last[key] > first[key] + 2]
    if last["resident_bytes"] > first["resident_bytes"] + GROWTH_BYTES:
        grown.append("resident_bytes")
    return [f"{key} grew from {first[key]} to {last[key]}" for key in grown]
