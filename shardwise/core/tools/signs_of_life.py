"""A line every ten seconds while something takes long, on a terminal and in a log."""

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

EVERY_S = 10.0


@contextmanager
def signs_of_life(what: Callable[[], str]) -> Generator[None]:
    """Print `what` and the time that it has taken, on standard error, inside `with`."""
    ended, began = threading.Event(), time.monotonic()

    def run() -> None:
        while not ended.wait(EVERY_S):
            print(f"{what()}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=run, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
