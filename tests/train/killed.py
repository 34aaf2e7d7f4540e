"""`shardwise train`, of which rank 1 is killed after its first step, and once more after step 5.

A program of the tests, started by torchrun: what is killed at once leaves no checkpoint to go on
from, what is killed later does.  The file KILLS counts, as the agents' own counts may differ.
"""

import os
import signal
from pathlib import Path
from typing import Any

from shardwise.cli import main as cli
from shardwise.train import loop

#: The steps after which rank 1 is killed, one after the other.
KILLED = (1, 5, None)


def main() -> None:
    """The command line, with a loop that ends one rank."""
    told, kills = loop.tell, Path(os.environ["KILLS"])
    killed = kills.read_text() if kills.exists() else ""

    def tell(run: loop.Run, record: Any) -> None:
        told(run, record)
        if run.engine.world.rank == 1 and record.step == KILLED[len(killed)]:
            kills.write_text(killed + "x")
            os.kill(os.getpid(), signal.SIGKILL)

    loop.tell = tell
    cli.main()


if __name__ == "__main__":
    main()
