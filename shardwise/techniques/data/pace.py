"""How far communication runs ahead of computation: options of the hooks of one model."""

from dataclasses import dataclass

from shardwise.core.arena_slots import IN_FLIGHT


@dataclass(frozen=True)
class Pace:
    """How far communication runs ahead of computation, and how gradients are scaled.

    ahead      units gathered before they are needed
    in_flight  concurrent reductions, if each holds buffers
    scale      a factor for every collected gradient (for a mean over ranks: 1/n)
    by_hand    the user's own loop updates: each backward pass ends with sharded parameters and
               gradients
    """

    ahead: int = 1
    in_flight: int = IN_FLIGHT
    scale: float = 1.0
    by_hand: bool = True
