"""How long a run waits before it reports that something is wrong, read from the environment.

SHARDWISE_START_TIMEOUT_S   for all ranks to meet at the start                          60
SHARDWISE_FROZEN_S          for the next heartbeat of a rank                            10
SHARDWISE_PATIENCE_S        in one collective, for a rank that does not join it         600
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.core.errors import bad


@dataclass(frozen=True)
class Limits:
    """The limits, in seconds."""

    start_s: float = 60.0
    frozen_s: float = 10.0
    patience_s: float = 600.0

    @property
    def heartbeat_s(self) -> float:
        """The time between two heartbeats."""
        return min(1.0, self.frozen_s / 5)


def read_limits(variables: Mapping[str, str] | None = None) -> Limits:
    """The limits in `variables`, by default the environment.

    Raises:
        InputError: one of them is not a number of seconds above zero.
    """
    found = os.environ if variables is None else variables
    usual = Limits()
    return Limits(
        _seconds(found, "SHARDWISE_START_TIMEOUT_S", usual.start_s),
        _seconds(found, "SHARDWISE_FROZEN_S", usual.frozen_s),
        _seconds(found, "SHARDWISE_PATIENCE_S", usual.patience_s),
    )


def _seconds(variables: Mapping[str, str], name: str, usual: float) -> float:
    text = variables.get(name, "")
    if not text:
        return usual
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise bad(
            f"{name}='{text}' in the environment",
            "a number of seconds above 0",
            f"export {name}={usual:.0f}, which is the default",
        )
    return seconds
