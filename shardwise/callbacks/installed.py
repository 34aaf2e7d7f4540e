"""Whether the package of a tracker is installed."""

from importlib.util import find_spec
from typing import Final

from shardwise.core.errors import bad

PACKAGES: Final = {"wandb": "wandb", "mlflow": "mlflow-skinny"}


def require_installed(module: str) -> None:
    """Raise InputError with the command that installs the tracker, if it is missing."""
    if find_spec(module) is None:
        raise bad(
            f"the tracker {module}, which is not installed",
            "a tracker that is installed",
            f"pip install {PACKAGES[module]}",
        )
