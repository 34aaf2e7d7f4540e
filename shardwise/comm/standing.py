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
    """Follows thread `ident`.  Frames of the files in `around` are not shown."""

    def __init__(self, ident: int, around: Collection[str] = ()) -> None:
        self.ident, self.around = ident, around
        self.meeting: tuple[FrameType, int] | None = None  # the call other ranks have to join
        self._since = time.monotonic()

    def look(self) -> bool:
        """Look again; whether the program is in the same meeting as at the look before."""
        before, self.meeting = self.meeting, meeting(self.ident)
        if self.meeting is None or self.meeting != before:
            self._since = time.monotonic()
            return False
        return True

    @property
    def waits_s(self) -> float:
        """For how long the program has been in the meeting it is in."""
        return 0.0 if self.meeting is None else time.monotonic() - self._since

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


def meeting(ident: int) -> tuple[FrameType, int] | None:
    """The call in which the thread is, where it is one that other ranks have to join."""
    frame = sys._current_frames().get(ident)
    if not _meets(frame):
        return None
    while _meets(frame.f_back):  # who watches a mailbox is in another call each time
        frame = frame.f_back
    return frame, frame.f_lasti


def _meets(frame: FrameType | None) -> TypeGuard[FrameType]:
    return frame is not None and frame.f_code.co_filename.startswith(_MEETING)
