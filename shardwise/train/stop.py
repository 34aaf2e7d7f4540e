"""The wish to stop: SIGTERM or SIGINT sets a flag, and the ranks agree on it between steps.

A signal may reach one rank a step before another, or only one of them. The step after which the run
stops has to be the same for all, or some would wait for ever in the next step's collectives. So
after each step the ranks take the maximum of their flags: one number, counted in the ledger under
the phase `check`.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from shardwise.comm.collectives import all_reduce
from shardwise.comm.world import World

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopWish:
    """Within `with`, the signals set `wished` instead of ending the process; a second one ends it.

    Python lets only the main thread handle signals: elsewhere this waits for none.
    """

    def __init__(self) -> None:
        self.wished = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._restore()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.wished = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def any_rank(flag: bool, world: World) -> bool:
    """Whether the flag is set on at least one rank; the same answer on all."""
    return bool(ranks_with(flag, world))


def ranks_with(flag: bool, world: World) -> list[int]:
    """The ranks on which the flag is set; the same list on all. One byte a rank is sent."""
    flags = torch.zeros(world.size, dtype=torch.uint8, device=world.device)
    flags[world.rank] = flag
    with world.ledger.phase("check"):
        all_reduce(flags, world.everyone)
    return flags.nonzero().flatten().tolist()
