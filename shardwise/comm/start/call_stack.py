"""The call stack of a rank's main thread, and how long that thread has been in one collective.

train.py:12 in main > engine.py:144 in step > collectives.py:80 in all_gather
                                              ^ a collective: other ranks must join it
"""

import contextlib
import sys
import time
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import torch
from torch.distributed import distributed_c10d

#: A thread inside one of these files waits for other ranks.
_COLLECTIVE_FILES = (str(Path(__file__).parent.parent), str(distributed_c10d.__file__))
_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[2])
_STDLIB = str(Path(contextlib.__file__).parent)
_NOT_THE_PROGRAM = (_PACKAGE, _TORCH, _STDLIB, "<frozen ")
#: Files that call the program, whose frames and all outside them are not shown.
HIDDEN_FILES = (str(Path(__file__).with_name("worker.py")), "<frozen runpy>")
_BUSY = 0.2  # processors that a rank uses at most while no message moves
_GPU_S = 5.0  # time in one call, after which its wait may be for a GPU
_FIRST, _LAST = 3, 5  # calls shown of a deep stack
_MOST = 1000  # characters shown


class CallStack:
    """The call stack of thread `ident`, and for how long it has waited for other ranks.

    To recognise a call it has seen before, it sets a mark on the frame.  Keeping the frame would
    keep all local variables of the stack alive, a step's activations among them.  The mark is
    `f_trace_lines`, which only a debugger reads.  A frame has one such mark, so create only one
    CallStack per thread.
    """

    def __init__(self, ident: int, gpu: int | None = None) -> None:
        self.ident, self.gpu = ident, gpu
        self._at = -1  # the instruction inside the frame
        self._since = self._looked = self._busy = time.monotonic()
        self._cpu_s = 0.0

    def waits(self) -> tuple[float, float]:
        """How long the thread has been in one collective, and for how long no message has moved.

        A call in which it waits for its GPU counts too: NCCL's collectives return at once, and the
        rank waits in `.item()`, say.  No message moves while the process uses no processor; on a
        GPU nobody knows.
        """
        now, cpu_s = time.monotonic(), time.process_time()
        if cpu_s - self._cpu_s > _BUSY * (now - self._looked):
            self._busy = now
        self._looked, self._cpu_s = now, cpu_s
        collective = collective_frame(self.ident)
        frame = collective or sys._current_frames().get(self.ident)
        if frame is None or self._at != frame.f_lasti or frame.f_trace_lines:
            self._since = now
        if frame is not None:
            self._at, frame.f_trace_lines = frame.f_lasti, False
        stays_s = now - self._since
        if collective is None and (stays_s < _GPU_S or not _is_busy(self.gpu)):
            return 0.0, 0.0
        return stays_s, 0.0 if self.gpu is not None else min(stays_s, now - self._busy)

    def calls(self) -> str:
        """The calls of the stack, outermost first, without those inside torch."""
        frame, found = sys._current_frames().get(self.ident), list[str]()
        while frame is not None and frame.f_code.co_filename not in HIDDEN_FILES:
            file = frame.f_code.co_filename
            if not found or not file.startswith((_TORCH, "<frozen ")):
                name = "/".join(Path(file).parts[-2:])
                found.append(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        found.reverse()
        if len(found) > _FIRST + _LAST:
            found[_FIRST:-_LAST] = ["..."]
        return " > ".join(found)[-_MOST:]


def _is_busy(gpu: int | None) -> bool:
    """Whether the GPU has work that it has not ended."""
    return gpu is not None and not torch.cuda.default_stream(gpu).query()


def collective_frame(ident: int) -> FrameType | None:
    """The outermost frame of the collective that the thread is in; None outside collectives.

    Inner frames change while a rank polls a mailbox.  Do not keep the frame: see CallStack.
    """
    frame, outermost = sys._current_frames().get(ident), None
    while frame is not None and frame.f_code.co_filename.startswith(_COLLECTIVE_FILES):
        frame, outermost = frame.f_back, frame
    return outermost


def place() -> str:
    """The function outside comm/ and torch that called this one, and the line of the program.

    Such as `step (loop.py:12), from main (train.py:3)`.
    """
    function = _outside(sys._getframe(), (_COLLECTIVE_FILES[0], _TORCH))
    users = _outside(function, _NOT_THE_PROGRAM)
    return ", from ".join(
        f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        for frame in dict.fromkeys((function, users))
    )


def _outside(start: FrameType, inside: tuple[str, ...]) -> FrameType:
    """The innermost frame outside these files; `start` if there is none."""
    frames = (frame for frame, _ in walk_stack(start))
    return next((f for f in frames if not f.f_code.co_filename.startswith(inside)), start)
