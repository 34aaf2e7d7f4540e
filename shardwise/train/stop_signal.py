"""SIGTERM and SIGINT in one process of a run.

    start-up     inputs are checked, nothing is written yet    the process exits at once
    run          all ranks take part in every step             sets a flag; ranks agree (stop.py)

It does not import torch, so that a signal works while torch is being imported.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final, Self

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
NOTHING: Final = "stopped by a signal before its first step: nothing was trained"


class StopSignal:
    """Inside `with`, a signal sets `received` instead of ending the process; a second one ends it.

    While `leaving` is true, a signal also raises KeyboardInterrupt. Python handles signals only in
    the main thread; in other threads this does nothing.
    """

    def __init__(self, leaving: bool = False) -> None:
        self.received = False
        self.leaving = leaving
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
        self.received = True
        self._restore()
        if self.leaving:
            raise KeyboardInterrupt

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
