"""The look-out of a rank: a thread that gives signs of life, and sees waits that cannot end.

    rank 0    step   step   all_gather ..........      has stood there for 3 s, in a collective
    rank 1    step   done   (stays for what it has sent, and sends no more)

Nobody can come to such a collective any more, and it would give up only after minutes.  The rank
says in the room that it waits; where all others wait or are done, none can help the other, and the
first to see that fails with the place at which its program stands.  Where none is done, each waits
for another kind of message than the others have sent: it takes them longer to be sure of that.
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

from shardwise.comm.beat import Beat
from shardwise.comm.host import host_number
from shardwise.comm.limits import read_limits
from shardwise.comm.standing import Standing, meeting
from shardwise.comm.status_dir import Room

LOOKOUT = "look-out"  # the name of the threads
_GLANCE_S = 0.5
_LOOKS = 6  # in a row that find a rank where it was, with nothing done
_MORE_LOOKS = 20  # where no rank is done
_IDLE_S = 0.2 * _GLANCE_S  # more of a processor's time than this in a glance: messages move


class LookOut:
    """The thread, which looks at the thread that makes it until `stop`.

    `around` are files whose frames the place is told without.
    """

    def __init__(self, room: Room, rank: int, around: Collection[str]) -> None:
        self.room, self.rank, self.around = room, rank, around
        self.standing = Standing(threading.get_ident(), around)
        self.beat = Beat(0, os.getpid(), host_number())
        self.beat_s = read_limits().beat_s
        room.send_beat(rank, self.beat)
        self.stopped = threading.Event()
        self.threads = [
            threading.Thread(target=each, name=LOOKOUT, daemon=True)
            for each in (self._look, self._beat)
        ]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End the threads, which else could look at the program's frames to the very end.

        A process group that such a frame keeps alive would then be destroyed by a thread while the
        interpreter ends, which aborts the process.
        """
        self.stopped.set()
        for thread in self.threads:
            thread.join()
        self.room.send_beat(self.rank, replace(self.beat, left=True, waits_s=0.0))

    def _beat(self) -> None:
        while not self.stopped.is_set():
            count, calls = self.beat.count + 1, self.standing.calls()
            waits_s = self.standing.waits_s
            self.beat = replace(self.beat, count=count, calls=calls, waits_s=waits_s)
            with suppress(OSError):  # the launcher has gone, and its room; so will this rank
                self.room.send_beat(self.rank, self.beat)
            self.stopped.wait(self.beat_s)

    def _look(self) -> None:
        room, rank, standing = self.room, self.rank, self.standing
        looks, spent_s = 0, 0.0
        while not self.stopped.wait(_GLANCE_S):
            done = room.finished()
            idle_s, spent_s = spent_s + _IDLE_S, time.process_time()
            still = standing.look() and spent_s < idle_s
            looks = looks + 1 if still else 0
            if not done and torch.cuda.is_initialized():  # a processor may wait for its own GPU
                looks = 0
            enough = _LOOKS if done else _MORE_LOOKS
            room.waits(rank, looks >= enough)
            if looks <= enough or len(done | room.waiting()) < room.ranks:
                continue
            frame = meeting(standing.ident)
            if frame is not None:
                room.fail(rank, _told(frame, sorted(done), self.around))
                return


def _told(frame: FrameType, done: Collection[int], around: Collection[str]) -> str:
    stack = traceback.extract_stack(frame)
    first = max((i for i, each in enumerate(stack) if each.filename in around), default=-1) + 1
    told = "every rank waits here or elsewhere for another, and none can go on"
    if done:
        ranks = f"rank {', '.join(map(str, done))} {'has' if len(done) == 1 else 'have'}"
        told = f"{ranks} ended the program, and {'is' if len(done) == 1 else 'are'} waited for here"
    return (
        f"Traceback (most recent call last):\n{''.join(traceback.format_list(stack[first:]))}"
        f"RuntimeError: {told}: all ranks are to make the same steps"
    )
