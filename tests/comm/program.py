"""A command line program in miniature, for the tests of the launcher: it does what it is told.

Each line it writes carries its rank; the folder is where ranks leave their process numbers.
"""

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import shardwise.comm.world as worlds


def save_and_leave(rank: int, folder: Path) -> None:
    def saved(number: int, frame: FrameType | None) -> None:
        (folder / f"saved-{rank}").touch()
        sys.exit(0)

    signal.signal(signal.SIGTERM, saved)


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    world = worlds.init()
    if what == "saves":
        save_and_leave(world.rank, folder)
    world.barrier()
    (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
    if what == "refuse" or (what == "refuse-on-1" and world.rank == 1):
        print("Given: nothing. Allowed: something. Write instead: this.", file=sys.stderr)
        sys.exit(2)
    if what == "raise" and world.rank == 1:
        raise ArithmeticError("the loss has left the building")
    if what != "end":
        print(f"rank {world.rank} waits", flush=True)
        time.sleep(60)
