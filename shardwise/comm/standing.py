"""Where a program stands: the calls its main thread is in, and since when it waits for other ranks.

train.py:12 in main > engine.py:144 in step > collectives.py:80 in all_gather
                                              ^ a meeting: other ranks have to come here too
"""

import sys
import time
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import TypeGuard

import torch
from torch.distributed import distributed_c10d

#: A program that stands in one of these files waits for other ranks.
_MEETING = (str(Path(__file__).parent), str(distributed_c10d.__file__))
_TORCH = str(Path(torch.__file__).parent)
_FIRST, _LAST = 3, 5  # calls that are shown of a deep stack
_MOST = 1000  # characters of them


class Standing:
    """Follows thread `ident`.  Frames of the files in `around` are not shown.

    A meeting seen before is recognised by a mark on its frame.  Keeping the frame itself would keep
    the values of all calls that it is in, a step's activations among them, after they have
    returned.  The mark is `f_trace_lines`, which only a debugger reads; one Standing may look at a
    thread, since a frame has one mark.
    """

    def __init__(self, ident: int, around: Collection[str] = ()) -> None:
        self.ident, self.around = ident, around
        self.meets = False  # in a call that other ranks have to join
        self._at = -1  # the instruction of that call
        self._since = time.monotonic()

    def look(self) -> bool:
        """Look again; whether the program is in the same meeting as at the look before."""
        frame = meeting(self.ident)
        if frame is None:
            self.meets = False
            return False
        same = self.meets and self._at == frame.f_lasti and not frame.f_trace_lines
        self.meets, self._at, frame.f_trace_lines = True, frame.f_lasti, False
        if not same:
            self._since = time.monotonic()
        return same

    @property
    def waits_s(self) -> float:
        """For how long the program has been in the meeting it is in."""
        return time.monotonic() - self._since if self.meets else 0.0

    def calls(self) -> str:
        """The calls the program is in, outermost first, without those inside torch."""
        frame, found = sys._current_frames().get(self.ident), list[str]()
        while frame is not None and frame.f_code.co_filename not in self.around:
            file = frame.f_code.co_filename
            if not found or not file.startswith((_TORCH, "<frozen ")):
                name = "/".join(Path(file).parts[-2:])
                found.append(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        found.reverse()
        if len(found) > _FIRST + _LAST:
            found[_FIRST:-_LAST] = ["..."]
        return " > ".join(found)[-_MOST:]


def meeting(ident: int) -> FrameType | None:
    """The call in which the thread is, where it is one that other ranks have to join.

    Not to be kept: see Standing.
    """
    frame = sys._current_frames().get(ident)
    if not _meets(frame):
        return None
    while _meets(frame.f_back):  # who watches a mailbox is in another call each time
        frame = frame.f_back
    return frame


def _meets(frame: FrameType | None) -> TypeGuard[FrameType]:
    return frame is not None and frame.f_code.co_filename.startswith(_MEETING)
