"""`shardwise train`, of which rank 1 is killed after step 5 of the first start, and after step 2.

A program of the tests, started by torchrun: what is killed at once leaves no checkpoint to go on
from, what is killed later does.
"""

import os
import signal
from typing import Any

from shardwise.train import cli, loop

#: The step after which rank 1 is killed, in each start.
KILLED = {"0": 1, "1": 5}


def main() -> None:
    """The command line, with a loop that ends one rank."""
    told, restart = loop.tell, os.environ["TORCHELASTIC_RESTART_COUNT"]

    def tell(run: loop.Run, record: Any) -> None:
        told(run, record)
        if run.engine.world.rank == 1 and record.step == KILLED.get(restart):
            os.kill(os.getpid(), signal.SIGKILL)

    loop.tell = tell
    cli.main()


if __name__ == "__main__":
    main()
