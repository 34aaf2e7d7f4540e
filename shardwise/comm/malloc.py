"""this file is one request to the C library: keep the memory that tensors free.

A training step on a processor frees and allocates the same large blocks again and again. By
default glibc hands them back to the kernel, and every page is faulted in anew: for a 33M-parameter
model some 18,000 faults a step, 5 to 8 % of its time. Asked to keep them, it reuses them.

The price is that a process's size stays at its peak; live tensors are what `engine.memory()` reads.
Where the C library is another one, nothing happens.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 2**31 - 1


def keep_freed_memory() -> bool:
    """Ask glibc not to return memory to the kernel; whether it agreed."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    blocks = mallopt(_M_MMAP_THRESHOLD, 2**30)
    return bool(blocks and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
