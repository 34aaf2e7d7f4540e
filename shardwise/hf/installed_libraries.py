"""Whether the libraries that `sw.hf` needs are installed."""

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from shardwise.core.errors import bad

#: The first versions whose Trainer has the methods that `sw.hf.Trainer` overrides.
OLDEST: Final = {"transformers": (5, 23), "accelerate": (1, 15)}


def require_installed() -> None:
    """Raise InputError unless transformers and accelerate are installed and new enough."""
    wanted = [f"'{name}>={major}.{minor}'" for name, (major, minor) in OLDEST.items()]
    for name, oldest in OLDEST.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = ""
        if not found or tuple(map(int, re.findall(r"\d+", found)[:2])) < oldest:
            raise bad(
                f"shardwise.hf with {f'{name} {found}' if found else f'no {name}'}",
                f"{' and '.join(wanted)}, of the extra `hf`",
                f"pip install {' '.join(wanted)}",
            )
