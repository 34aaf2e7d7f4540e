"""Files that readers never see half written."""

import os
from collections.abc import Callable
from pathlib import Path


def publish(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path` and rename, so that readers never see a partial file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
