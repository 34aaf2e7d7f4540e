"""`shardwise train` for the soak: its steps take a while, and each rank notes its vital signs.

A line of the file VITALS has the process, its rank, the step, and the descriptors, threads and
resident bytes of the process after it. Ranks import this program, so its changes are theirs too.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from shardwise.cli import main as cli
from shardwise.train import loop

_told = loop.tell


def tell(run: loop.Run, record: Any) -> None:
    """What the loop does after each step, and a line."""
    _told(run, record)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    line = {
        "pid": os.getpid(),
        "rank": run.engine.world.rank,
        "step": record.step,
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
        "threads": len([*Path("/proc/self/task").iterdir()]),
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }
    with Path(os.environ["VITALS"]).open("a") as file:
        file.write(json.dumps(line) + "\n")
    time.sleep(float(os.environ["PAUSE_S"]))


loop.tell = tell

if __name__ == "__main__":
    cli.main()
