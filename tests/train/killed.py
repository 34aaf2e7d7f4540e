"""`shardwise train`, of which rank 1 is killed after its first step, and once more after step 5.

A program of the tests, started by torchrun or by itself: what is killed at once leaves no
checkpoint to go on from, what is killed later does.  The file KILLS counts, as the agents' own
counts may differ.  The steps of fewer ranks than MOST are slow, so that the run can grow meanwhile.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from shardwise.cli import main as cli
from shardwise.train import loop

#: The steps after which rank 1 is killed, one after the other.
KILLED = (1, 5, None)
KILLS = Path(os.environ["KILLS"])
_told = loop.tell


def tell(run: loop.Run, record: Any) -> None:
    """What the loop does after each step, and the end of rank 1 after some."""
    killed = KILLS.read_text() if KILLS.exists() else ""
    _told(run, record)
    world = run.engine.world
    if world.rank == 1 and record.step == KILLED[len(killed)]:
        KILLS.write_text(killed + "x")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5 * (world.size < int(os.environ.get("MOST", "0"))))


loop.tell = tell  # also in ranks that this program starts, which import it

if __name__ == "__main__":
    cli.main()
