"""A thread on each rank that sends heartbeats and detects collectives that cannot complete.

    rank 0    step   step   all_gather ..........      has been in this collective for 3 s
    rank 1    step   done   (has sent everything, and sends no more)

No rank will join rank 0's collective, and the collective itself would time out only after minutes.
A rank that stays in a collective marks itself as waiting in the status directory.  When every other
rank is waiting or done, the first rank to notice fails with its stack trace.  If no rank is done,
the ranks wait for different messages; detecting this takes longer, to rule out slow progress.
"""

import os
import threading
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from types import FrameType

import torch

from shardwise.comm.call_stack import CallStack, collective_frame
from shardwise.comm.heartbeat import Heartbeat
from shardwise.comm.host import host_number
from shardwise.comm.limits import read_limits
from shardwise.comm.status_dir import StatusDir

HANG_DETECTOR = "hang-detector"  # the name of the threads
_POLL_S = 0.5
_POLLS = 6  # consecutive polls without progress before a rank counts as waiting
_MORE_POLLS = 20  # the same while no rank is done
_IDLE_S = 0.2 * _POLL_S  # more processor time than this in a poll means that messages move


class HangDetector:
    """Watches the thread that creates it, until `stop`.

    Frames of `hidden_files` are left out of stack traces.
    """

    def __init__(self, status: StatusDir, rank: int, hidden_files: Collection[str]) -> None:
        self.status, self.rank, self.hidden_files = status, rank, hidden_files
        self.call_stack = CallStack(threading.get_ident(), hidden_files)
        self.beat = Heartbeat(0, os.getpid(), host_number())
        self.heartbeat_s = read_limits().heartbeat_s
        status.send_heartbeat(rank, self.beat)
        self.stopped = threading.Event()
        self.threads = [
            threading.Thread(target=each, name=HANG_DETECTOR, daemon=True)
            for each in (self._detect, self._send_heartbeats)
        ]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End the threads, so that none holds a frame of the program while Python shuts down.

        A frame can keep a process group alive.  If a thread destroyed that group during shutdown,
        the process would abort.
        """
        self.stopped.set()
        for thread in self.threads:
            thread.join()
        self.status.send_heartbeat(self.rank, replace(self.beat, left=True, waits_s=0.0))

    def _send_heartbeats(self) -> None:
        while not self.stopped.is_set():
            count, calls = self.beat.count + 1, self.call_stack.calls()
            waits_s = self.call_stack.waits_s
            self.beat = replace(self.beat, count=count, calls=calls, waits_s=waits_s)
            with suppress(OSError):  # the launcher and its directory are gone
                self.status.send_heartbeat(self.rank, self.beat)
            self.stopped.wait(self.heartbeat_s)

    def _detect(self) -> None:
        status, rank, call_stack = self.status, self.rank, self.call_stack
        polls, cpu_s = 0, 0.0
        while not self.stopped.wait(_POLL_S):
            done = status.finished()
            idle_s, cpu_s = cpu_s + _IDLE_S, time.process_time()
            stuck = call_stack.same_collective() and cpu_s < idle_s
            polls = polls + 1 if stuck else 0
            if not done and torch.cuda.is_initialized():  # the wait may be for this rank's own GPU
                polls = 0
            enough = _POLLS if done else _MORE_POLLS
            status.set_waiting(rank, polls >= enough)
            if polls <= enough or len(done | status.waiting()) < status.ranks:
                continue
            frame = collective_frame(call_stack.ident)
            if frame is not None:
                status.fail(rank, _hang_error(frame, sorted(done), self.hidden_files))
                return


def _hang_error(frame: FrameType, done: Collection[int], hidden_files: Collection[str]) -> str:
    stack = traceback.extract_stack(frame)
    hidden = (i for i, each in enumerate(stack) if each.filename in hidden_files)
    first = max(hidden, default=-1) + 1
    why = "every rank is waiting in a collective that no other rank will join"
    if done:
        ranks = f"rank {', '.join(map(str, done))} {'has' if len(done) == 1 else 'have'}"
        why = f"{ranks} ended the program, and this collective waits for all ranks"
    return (
        f"Traceback (most recent call last):\n{''.join(traceback.format_list(stack[first:]))}"
        f"RuntimeError: {why}. All ranks must run the same number of steps"
    )
