"""The signals that stop a run, in a launcher and in each rank.

    start-up     inputs are checked, nothing is written yet    the process exits at once
    run          all ranks take part in every step             sets a flag; ranks agree (stop.py)

SIGTERM and SIGHUP come from batch systems, SIGUSR1 from `sbatch --signal=USR1@120`, SIGINT from
Ctrl-C.  A process often receives one request several times: systemd, Slurm and cgroups signal every
process of a job, and a launcher forwards what it received.  So repeats are ignored while the
checkpoint is written.  Only a person who presses Ctrl-C again ends the process without it.

It does not import torch, so that a signal works while torch is being imported.
"""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Final, Self

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
#: SIGINT that comes sooner after the first one is a copy of it.
COPY_S: Final = 0.5
NOTHING: Final = "stopped by a signal before its first step: nothing was trained"


class StopSignal:
    """Inside `with`, `number` is that of the first signal, which has no other effect.

    A second SIGINT raises KeyboardInterrupt.  While `leaving` is true, any signal does.  Python
    handles signals only in the main thread; in other threads this does nothing.  SIGHUP that is
    ignored (`nohup`) stays so.  With `until_end` the handlers stay after `with`, for a rank whose
    process then ends: its launcher may still forward the signal.
    """

    def __init__(self, leaving: bool = False, *, until_end: bool = False) -> None:
        self.number = 0
        self.leaving = leaving
        self.until_end = until_end
        self._interrupted_s = 0.0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def received(self) -> bool:
        """Whether a signal was received."""
        return self.number > 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            numbers = [each for each in SIGNALS if not (nohup and each == signal.SIGHUP)]
            self._before = {number: signal.signal(number, self._take) for number in numbers}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items() if not self.until_end else ():
            signal.signal(number, handler)
        self._before = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        now, before = time.monotonic(), self._interrupted_s
        self.number = self.number or number
        if number == signal.SIGINT and not before:
            self._interrupted_s = now
        if self.leaving or (number == signal.SIGINT and before and now - before > COPY_S):
            raise KeyboardInterrupt
