"""`shardwise train` for the soak: its steps take a while, and each rank notes its vital signs.

After each step they are a line of the file VITALS. Ranks import this program, so its changes are
theirs too.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from shardwise.cli import main as cli
from shardwise.train import loop
from tests.soak import vital_signs

_told = loop.tell


def tell(run: loop.Run, record: Any) -> None:
    """What the loop does after each step, and a line."""
    _told(run, record)
    with Path(os.environ["VITALS"]).open("a") as file:
        file.write(json.dumps(vital_signs(run.engine.world.rank, record.step)) + "\n")
    time.sleep(float(os.environ["PAUSE_S"]))


loop.tell = tell

if __name__ == "__main__":
    cli.main()
