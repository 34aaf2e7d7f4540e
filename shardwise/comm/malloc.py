"""A setting of glibc's malloc: keep freed memory instead of returning it to the kernel.

A training step on a processor frees and allocates the same large blocks again and again.  By
default glibc returns them to the kernel, and every page faults again: about 18,000 faults a step
for a 33M-parameter model, 5 to 8 % of the step's time.

The cost: the process stays at its peak size.  (`engine.memory()` counts live tensors, not this.)
With another C library nothing happens.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 2**31 - 1


def keep_freed_memory() -> bool:
    """Ask glibc not to return memory to the kernel.  True if it accepted."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    blocks = mallopt(_M_MMAP_THRESHOLD, 2**30)
    return bool(blocks and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
