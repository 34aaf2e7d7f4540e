"""The call stack of a rank's main thread, and how long that thread has been in one collective.

train.py:12 in main > engine.py:144 in step > collectives.py:80 in all_gather
                                              ^ a collective: other ranks must join it
"""

import contextlib
import sys
import time
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import TypeGuard

import torch
from torch.distributed import distributed_c10d

#: A thread inside one of these files waits for other ranks.
_COLLECTIVE_FILES = (str(Path(__file__).parent), str(distributed_c10d.__file__))
_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parent.parent)
_STDLIB = str(Path(contextlib.__file__).parent)
_FIRST, _LAST = 3, 5  # calls shown of a deep stack
_MOST = 1000  # characters shown


class CallStack:
    """The call stack of thread `ident`.  Frames of `hidden_files` are not shown.

    To recognise a collective it has seen before, it sets a mark on the frame.  Keeping the frame
    would keep all local variables of the stack alive, a step's activations among them.  The mark is
    `f_trace_lines`, which only a debugger reads.  A frame has one such mark, so create only one
    CallStack per thread.
    """

    def __init__(self, ident: int, hidden_files: Collection[str] = ()) -> None:
        self.ident, self.hidden_files = ident, hidden_files
        self.in_collective = False
        self._at = -1  # the instruction inside the collective's frame
        self._since = time.monotonic()

    def same_collective(self) -> bool:
        """Whether the thread is in the same collective as at the previous call."""
        frame = collective_frame(self.ident)
        if frame is None:
            self.in_collective = False
            return False
        same = self.in_collective and self._at == frame.f_lasti and not frame.f_trace_lines
        self.in_collective, self._at, frame.f_trace_lines = True, frame.f_lasti, False
        if not same:
            self._since = time.monotonic()
        return same

    @property
    def waits_s(self) -> float:
        """How long the thread has been in its current collective."""
        return time.monotonic() - self._since if self.in_collective else 0.0

    def calls(self) -> str:
        """The calls of the stack, outermost first, without those inside torch."""
        frame, found = sys._current_frames().get(self.ident), list[str]()
        while frame is not None and frame.f_code.co_filename not in self.hidden_files:
            file = frame.f_code.co_filename
            if not found or not file.startswith((_TORCH, "<frozen ")):
                name = "/".join(Path(file).parts[-2:])
                found.append(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        found.reverse()
        if len(found) > _FIRST + _LAST:
            found[_FIRST:-_LAST] = ["..."]
        return " > ".join(found)[-_MOST:]


def collective_frame(ident: int) -> FrameType | None:
    """The outermost frame of the collective that the thread is in; None outside collectives.

    Do not keep the frame: see CallStack.
    """
    frame = sys._current_frames().get(ident)
    if not _waits_for_ranks(frame):
        return None
    while _waits_for_ranks(frame.f_back):  # inner frames change while a rank polls a mailbox
        frame = frame.f_back
    return frame


def _waits_for_ranks(frame: FrameType | None) -> TypeGuard[FrameType]:
    return frame is not None and frame.f_code.co_filename.startswith(_COLLECTIVE_FILES)


def caller() -> str:
    """The function outside comm/ and torch that called this one, such as `step (loop.py:12)`."""
    return _named(_outside(sys._getframe(), (_COLLECTIVE_FILES[0], _TORCH)))


def place() -> str:
    """`caller`, and the line of the user's program or model from which it was called."""
    frame = _outside(sys._getframe(), (_COLLECTIVE_FILES[0], _TORCH))
    users = _outside(frame, (_PACKAGE, _TORCH, _STDLIB, "<frozen "))
    users_file = users.f_code.co_filename
    if users is frame or users_file.startswith((_PACKAGE, _TORCH, _STDLIB, "<frozen ")):
        return _named(frame)
    return f"{_named(frame)}, from {_named(users)}"


def _outside(frame: FrameType, inside: tuple[str, ...]) -> FrameType:
    """The innermost frame outside these files, or the outermost."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return frame


def _named(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
