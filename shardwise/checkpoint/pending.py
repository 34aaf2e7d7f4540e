"""Checkpoints that threads write beside the next steps.

    main thread    plan, copy | step 101 | step 102 | step 103 | step 104 | ...
    thread, rank 0            | write ........ wait for ranks .. publish |
    thread, rank 1            | write .............. report |

The copy of a rank's pieces in host memory is of one moment, between two steps. The threads send no
messages: two threads that use one process group exchange their messages, or wait for each other.
Each rank reports in the unfinished folder, which all ranks see anyway, and rank 0 publishes when it
has read all reports. A report is `.written-RANK`: what the rank has written, or why it could not.
The ranks agree on the outcome when their main threads meet: in `result`, or in the next save.
"""

import atexit
import json
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.checkpoint.folder import write_file
from shardwise.checkpoint.save import PlannedSave, Written
from shardwise.checkpoint.save_plans import PIECE_BYTES
from shardwise.comm.move import all_gather_object
from shardwise.comm.tiers.tiers import Tiers, begin_copy
from shardwise.comm.transport import Pending
from shardwise.core.errors import RunError

POLL_S: Final = 0.05
#: How long rank 0 waits for the reports of other ranks after its program has ended.
MOST_S: Final = 600.0
#: How long a rank that has failed waits for what it writes, and for other ranks.
FAILED_S: Final = 5.0
#: Memory of a snapshot is allocated in blocks, each freed when its pieces are written.
BLOCK_BYTES: Final = 4 * PIECE_BYTES
ALIGN_BYTES: Final = 64


class PendingCheckpoint:
    """A checkpoint that is being saved, made by `sw.async_save`. It will be at `path`."""

    def __init__(self, save: PlannedSave) -> None:
        """Called by all ranks. Copies this rank's pieces, and begins to write."""
        self.path, self.world = save.path, save.world
        self.write_s = 0.0
        self._failure, self._reported, self._settled = "", False, False
        self._written, self._abandoned = threading.Event(), threading.Event()
        copies: list[Pending[Tensor]] = []
        # nothing is to be copied from a device, for which torch's writer waits for its stream
        save.files.per_thread_copy_ahead = 0
        if save.failure is not None:
            self._failure = str(save.failure)
        try:
            copies = snapshot(save.planner.tensors, self.world.tiers)
        except (RuntimeError, MemoryError) as error:  # no memory
            save.planner.tensors.clear()
            self._fail(save, error)
        self.world.background.jobs[save.folder.absolute()] = self
        atexit.register(self._at_exit)
        self._thread = threading.Thread(
            target=self._run, args=(save, copies), name="shardwise-save", daemon=True
        )
        self._thread.start()

    # --- the main thread ----------------------------------------------------------------------

    def done(self) -> bool:
        """Whether this rank's part has ended; on rank 0, whether all of it has. Does not wait."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        return bool(self._failure)

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until `done()`; with `limit_s` no longer than that, here and later. Never raises."""
        self._thread.join(limit_s)
        if limit_s is not None:
            self._abandoned.set()

    def result(self) -> Path:
        """Wait until the checkpoint is published; its path. All ranks must call it. Raises RunError
        on all ranks if one failed.
        """
        self._settle()
        self._reported = True
        if self._failure:
            raise RunError(self._failure)
        return self.path

    def _settle(self) -> None:
        if self._settled:
            return
        self._written.wait()
        failures = all_gather_object(self._failure, self.world)
        if any(failures):
            self._abandoned.set()  # a rank without access to the folder could not report
        self._thread.join()
        if not any(failures):
            failures = all_gather_object(self._failure, self.world)
        self._failure = next(filter(None, failures), "")
        self._settled = True
        atexit.unregister(self._at_exit)
        jobs = self.world.background.jobs
        jobs.pop(next(folder for folder, job in jobs.items() if job is self))

    def _at_exit(self) -> None:
        """Wait for the thread at the end of the program; a program that has failed ends soon."""
        failed = getattr(sys, "last_value", None) is not None
        if not self._abandoned.is_set():
            self.wait(FAILED_S if failed else None)
        if not self.done():
            self._failure = f"The checkpoint '{self.path}' was not finished when the program failed"
        self.report()

    def settle(self) -> None:
        """Wait for all ranks; rank 0 warns of a failure, unless `result` or a rank has said it."""
        self._settle()
        self._reported |= self.world.rank != 0
        self.report()

    def report(self) -> None:
        if self._failure and not self._reported:
            self._reported = True
            what = self._failure.removesuffix(".")
            warnings.warn(f"{what}. Training goes on without this checkpoint", stacklevel=2)

    # --- the thread ---------------------------------------------------------------------------

    def _run(self, save: PlannedSave, copies: Sequence[Pending[Tensor]]) -> None:
        began_s = time.perf_counter()
        with save.held:
            written = self._write(save, copies)
            self._written.set()
            if written is not None and save.world.rank == 0:
                self._publish(save, written)
        self.write_s = time.perf_counter() - began_s

    def _write(self, save: PlannedSave, copies: Sequence[Pending[Tensor]]) -> Written | None:
        if self._failure:
            with suppress(OSError):
                _report(save, {"error": self._failure})
            return None
        try:
            for copy in copies:
                copy.wait()
            written = save.write()
            _report(save, {"written": written.text()})
            return written
        except Exception as error:  # noqa: BLE001  said by the main thread
            self._fail(save, error)
            # rank 0 removes the folder when a rank has failed, and says so itself
            self._reported = save.world.rank > 0 and not Path(save.files.path).exists()
            with suppress(OSError):
                _report(save, {"error": self._failure})
            return None

    def _publish(self, save: PlannedSave, written: Written) -> None:
        try:
            others = [self._report_of(rank, save) for rank in range(1, save.world.size)]
            save.publish([written, *others])
        except Exception as error:  # noqa: BLE001  said by the main thread
            self._fail(save, error)

    def _fail(self, save: PlannedSave, error: Exception) -> None:
        save.planner.tensors.clear()
        self._failure = str(save.reason({save.world.rank: error}))

    def _report_of(self, rank: int, save: PlannedSave) -> Written:
        """What a rank has written. Raises RunError if it could not."""
        file, ended_s = _report_file(save, rank), 0.0
        while not file.exists():
            if self._abandoned.wait(POLL_S) or ended_s > MOST_S:
                raise RunError(f"The checkpoint '{save.path}' lacks the part of rank {rank}")
            if not threading.main_thread().is_alive():
                ended_s += POLL_S
        report = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        if "error" in report:
            raise RunError(report["error"])
        return Written.parse(report["written"])


def snapshot(pieces: dict[Any, Tensor], tiers: Tiers) -> list[Pending[Tensor]]:
    """Replace tensors by copies in host memory; returns the ends of the copies. On CUDA a side
    stream copies them to pinned memory. The current stream waits for that before it computes
    anything that follows; the host does not wait.
    """
    ends: list[Pending[Tensor]] = []
    rooms = {key: -(-piece.nbytes // ALIGN_BYTES) * ALIGN_BYTES for key, piece in pieces.items()}
    left, block, first = sum(rooms.values()), torch.empty(0, dtype=torch.uint8, device="cpu"), 0
    for key, piece in [*pieces.items()]:
        if first + rooms[key] > block.nbytes:
            block, first = tiers.empty(max(rooms[key], min(left, BLOCK_BYTES)), torch.uint8), 0
        copy = block[first : first + piece.nbytes].view(piece.dtype).view(piece.shape)
        first, left = first + rooms[key], left - rooms[key]
        if tiers.of(piece) == "device" and piece.device.type == tiers.device.type:
            ends.append(begin_copy(piece, tiers, "device", "host", copy))
        else:
            tiers.settle(piece)
            copy.copy_(piece)
        pieces[key] = copy
    tiers.follow("host")
    return ends


def _report_file(save: PlannedSave, rank: int) -> Path:
    return Path(save.files.path) / f".written-{rank}"


def _report(save: PlannedSave, report: dict[str, str]) -> None:
    if save.world.rank == 0:
        return
    text = json.dumps(report)
    write_file(_report_file(save, save.world.rank), lambda path: path.write_text(text, "utf-8"))
