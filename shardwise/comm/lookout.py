"""this file is a rank's look-out: whether it waits for ranks whose function has returned.

    rank 0    step   step   all_gather ..........      has stood there for 3 s, in a collective
    rank 1    step   done   (stays for what it has sent, and sends no more)

Nobody can come to such a collective any more, and it would give up only after minutes.  The rank
says in the room that it waits; where all others wait or are done, none can help the other, and the
first to see that fails with the place at which its program stands.  Where none is done, each waits
for another kind of message than the others have sent: it takes them longer to be sure of that.
"""

import sys
import threading
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import TypeGuard

import torch
from torch.distributed import distributed_c10d

from shardwise.comm.room import Room

_GLANCE_S = 0.5
_LOOKS = 6  # in a row that find a rank where it was, with nothing done
_MORE_LOOKS = 20  # where no rank is done
_IDLE_S = 0.2 * _GLANCE_S  # more of a processor's time than this in a glance: messages move
#: Where a program stands that waits for other ranks: in this folder, or in torch's collectives.
_MEETING = (str(Path(__file__).parent), str(distributed_c10d.__file__))


def look_out(room: Room, rank: int, ours: Collection[str]) -> None:
    """Begin to look, beside the calling thread, until that has its result.

    `ours` are files whose frames the place is told without.
    """
    program = threading.get_ident()
    threading.Thread(
        target=_look, args=(room, rank, program, ours), name="look-out", daemon=True
    ).start()


def _look(room: Room, rank: int, program: int, ours: Collection[str]) -> None:
    stands: tuple[FrameType, int] | None = None
    looks, spent_s = 0, 0.0
    while rank not in (done := room.finished()):
        time.sleep(_GLANCE_S)
        before, stands = stands, _stands(program)
        idle_s, spent_s = spent_s + _IDLE_S, time.process_time()
        still = stands is not None and stands == before and spent_s < idle_s
        looks = looks + 1 if still else 0
        if not done and torch.cuda.is_initialized():  # a processor may wait for its own GPU there
            stands = None
        enough = _LOOKS if done else _MORE_LOOKS
        room.waits(rank, looks >= enough)
        if stands is not None and looks > enough and len(done | room.waiting()) == room.ranks:
            room.fail(rank, _told(stands[0], sorted(done), ours))
            return


def _stands(program: int) -> tuple[FrameType, int] | None:
    """The call in which the program is, where it is one that other ranks are to join."""
    frame = sys._current_frames().get(program)
    if not _meets(frame):
        return None
    while _meets(frame.f_back):  # who watches a mailbox is in another call each time
        frame = frame.f_back
    return frame, frame.f_lasti


def _meets(frame: FrameType | None) -> TypeGuard[FrameType]:
    return frame is not None and frame.f_code.co_filename.startswith(_MEETING)


def _told(frame: FrameType, done: Collection[int], ours: Collection[str]) -> str:
    stack = traceback.extract_stack(frame)
    first = max((i for i, each in enumerate(stack) if each.filename in ours), default=-1) + 1
    told = "every rank waits here or elsewhere for another, and none can go on"
    if done:
        ranks = f"rank {', '.join(map(str, done))} {'has' if len(done) == 1 else 'have'}"
        told = f"{ranks} ended the program, and {'is' if len(done) == 1 else 'are'} waited for here"
    return (
        f"Traceback (most recent call last):\n{''.join(traceback.format_list(stack[first:]))}"
        f"RuntimeError: {told}: all ranks are to make the same steps"
    )
