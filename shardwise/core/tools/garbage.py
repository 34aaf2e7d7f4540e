"""Garbage collection that is complete when it returns, in programs with several threads.

    thread A    gc.collect() ............ done
    thread B         gc.collect() returns at once, and what A has not freed yet is alive

Ranks in threads would count objects that only cycles keep alive. Here B waits, and then collects.
"""

import gc
from threading import Lock
from typing import Final

COLLECTING: Final = Lock()


def collect() -> None:
    """Free what only reference cycles keep alive."""
    with COLLECTING:
        gc.collect()
