"""This file is the stop to stop, as one process hears it: SIGTERM or SIGINT.

    start-up     the inputs are looked at, nothing is written yet    the process leaves at once
    run          all ranks are in it, each step in all               a flag, for the ranks to agree

No torch: a run is to be stopped while torch is being imported, too.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final, Self

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
NOTHING: Final = "stopped by a signal before its first step: nothing was trained"


class StopSignal:
    """Within `with`, the signals set `wished` instead of ending the process; a second one ends it.

    While `leaving` is true, they also raise KeyboardInterrupt, where the program is. Python lets
    only the main thread handle signals: elsewhere this waits for none.
    """

    def __init__(self, leaving: bool = False) -> None:
        self.wished = False
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
        self.wished = True
        self._restore()
        if self.leaving:
            raise KeyboardInterrupt

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
