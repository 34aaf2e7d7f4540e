"""Two settings of glibc's malloc: keep freed memory, or return it to the kernel.

A training step on a processor frees and allocates the same large blocks again and again.  By
default glibc returns them to the kernel, and every page faults again: about 18,000 faults a step
for a 33M-parameter model, 5 to 8 % of the step's time.

The cost: the process stays at its peak size, and grows beyond it where small blocks that live long
lie in freed large ones.  (`engine.memory()` counts live tensors, not this.)  So a run whose
parameters rest on a disk, for want of memory, returns what it frees.  With another C library
nothing happens.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 2**31 - 1
RETURNED_BYTES = 2**20  # of a block, from which on it is returned when it is freed


def keep_freed_memory() -> bool:
    """Ask glibc not to return memory to the kernel.  True if it accepted."""
    return _set(2**30, KEPT_BYTES)


def return_freed_memory() -> bool:
    """Ask glibc to return large blocks to the kernel when they are freed.  True if it accepted."""
    return _set(RETURNED_BYTES, RETURNED_BYTES)


def _set(mmap_bytes: int, trim_bytes: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    blocks = mallopt(_M_MMAP_THRESHOLD, mmap_bytes)
    return bool(blocks and mallopt(_M_TRIM_THRESHOLD, trim_bytes))
