"""The disk tier: flat tensors in a file of a rank, read and written in aligned chunks by threads.

    file     | master: chunk 0 | chunk 1 | .. | exp_avg: chunk 0 | chunk 1 | ..

An extent is a flat tensor; a chunk is `chunk_numel` of its elements, the last one fewer.  Chunks
begin and end at multiples of 4096 bytes.  Where the file system takes O_DIRECT, transfers bypass
the page cache.  Host memory is that of the buffers, whatever the size of the file.  `extent.tensor`
maps the file for checkpoints: they read and write it after `sync`, and `drop` follows a write.

The file has no name (O_TMPFILE, or it is unlinked at once).  So the system frees it when the
process ends, also when it is killed, and no run can read a chunk of another.

After the first error all calls raise it: states on the disk may then be of two different steps.
(ZeRO-Infinity, arXiv 2104.07857, section 6.3: the NVMe offload engine.)
"""

import errno
import fcntl
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from shardwise.comm.ledger import Ledger
from shardwise.core.buffer_sizes import ALIGN_BYTES, CHUNK_NUMEL, in_blocks
from shardwise.core.errors import RunError, bad
from shardwise.core.layouts.layout import between
from shardwise.core.tally import TIER

#: Requests under way at once: one thread would wait for the disk request by request.
THREADS: Final = 4


#: os.preadv or os.pwritev.
Transfer = Callable[[int, Sequence[memoryview], int], int]
#: Waits until no copy between a part of the buffers' memory and the device is under way.
Settle = Callable[[Tensor], None]
_FOLDER: Final = "offload.folder=/mnt/nvme, a folder on a local disk"


class DiskError(RunError):
    """The disk failed while a run used it.  The last checkpoint is not concerned."""


class Inline(Executor):
    """Runs what is submitted at once: modes of a dry run belong to its thread."""

    def submit(self, fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Future[Any]:
        done = Future[Any]()
        done.set_result(fn(*args, **kwargs))
        return done


class Buffer:
    """Aligned host memory for one chunk."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.view = memoryview(b"" if memory.is_meta else cast(Any, memory.numpy()))

    def tensor(self, dtype: torch.dtype, numel: int) -> Tensor:
        return self.memory[: numel * dtype.itemsize].view(dtype)


class Extent:
    """A flat tensor in the file of `disk`, from byte `offset` on.  `name` is for errors."""

    def __init__(
        self, disk: "Disk", name: str, offset: int, numel: int, dtype: torch.dtype
    ) -> None:
        self.disk, self.name, self.offset = disk, name, offset
        self.numel, self.dtype = numel, dtype
        self.chunks = -(-numel // disk.chunk_numel)
        self.map = None if disk.dry else mmap.mmap(disk.file, self.stored_bytes, offset=offset)
        if self.map is None:
            self.tensor = torch.empty(numel, dtype=dtype, device="meta")
        else:
            self.tensor = torch.frombuffer(self.map, dtype=dtype, count=numel)
        self.writes: dict[int, Future[None]] = {}

    @property
    def whole_bytes(self) -> int:
        return sum(map(self.chunk_bytes, range(self.chunks)))

    @property
    def stored_bytes(self) -> int:
        return in_blocks(self.numel * self.dtype.itemsize)

    def span(self, chunk: int) -> tuple[int, int]:
        size = self.disk.chunk_numel
        return chunk * size, min(self.numel, (chunk + 1) * size)

    def chunk_bytes(self, chunk: int) -> int:
        first, last = self.span(chunk)
        return in_blocks((last - first) * self.dtype.itemsize)

    def sync(self) -> None:
        for chunk in list(self.writes):
            self.disk.finish(self.writes.pop(chunk))

    def position(self, chunk: int) -> int:
        return self.offset + chunk * self.disk.chunk_numel * self.dtype.itemsize


class Disk:
    """A file of chunks in `folder`, for the states of one rank; in a dry run there is none."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        ledger: Ledger,
        chunk_numel: int = CHUNK_NUMEL,
        *,
        dry: bool = False,
    ) -> None:
        self.chunk_numel, self.dry = chunk_numel, dry
        self.folder, self.rank, self.ledger = Path(folder), rank, ledger
        if not dry:
            self.file = open_unnamed(self.folder, rank, _FOLDER)
            weakref.finalize(self, os.close, self.file)
            self.direct = set_direct(self.file)
        self.extents: list[Extent] = []
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.failed: DiskError | None = None
        self._settle: Settle = lambda _: None
        self.use = DiskUse()
        self._threads = Inline() if dry else ThreadPoolExecutor(THREADS, "shardwise-disk")
        self._free: deque[Buffer] = deque()
        self.buffers = 0
        self._changed = threading.Condition()

    # --- the file and the buffers -------------------------------------------------------------

    def allocate(self, name: str, numel: int, dtype: torch.dtype) -> Extent:
        """Room for a tensor of zeros.  Raises InputError if the disk has not so many bytes free."""
        offset = self.stored_bytes
        wanted = in_blocks(numel * dtype.itemsize)
        try:
            if not self.dry:
                os.posix_fallocate(self.file, offset, wanted)
        except OSError as error:
            given = (
                f"the folder {self.folder} for {offset + wanted:,} bytes or more of rank "
                f"{self.rank} ({error.strerror})"
            )
            allowed = "a folder on a disk with room for the states of all its ranks"
            raise bad(given, allowed, "offload.folder=/a/larger/disk, or more ranks") from None
        extent = Extent(self, name, offset, numel, dtype)
        self.extents.append(extent)
        return extent

    @property
    def stored_bytes(self) -> int:
        return sum(extent.stored_bytes for extent in self.extents)

    def reserve(self, memory: Tensor, buffer_bytes: int, settle: Settle = lambda _: None) -> None:
        """Cut `memory`, uint8 on the host, into buffers of `buffer_bytes` from an aligned address.
        It has ALIGN_BYTES more than the buffers.  `settle` waits for copies to or from a part.
        """
        self.memory, skip = memory, -memory.data_ptr() % ALIGN_BYTES
        self._settle = settle
        parts = memory[skip:][: memory.numel() - ALIGN_BYTES].split(buffer_bytes)
        self._free = deque(Buffer(part) for part in parts if part.numel() == buffer_bytes)
        self.buffers = len(self._free)

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self) -> Buffer:
        """The buffer that was given back first: its copies have most likely ended."""
        with self._changed:
            if not self._free and self.failed is None:
                with self.use.spending("waited"):
                    self._changed.wait_for(lambda: self._free or self.failed)
            self.require()
            buffer = self._free.popleft()
        self._settle(buffer.memory)
        return buffer

    def release(self, buffer: Buffer) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    # --- transfers ----------------------------------------------------------------------------

    def begin_read(
        self, extent: Extent, chunk: int, buffer: Buffer, *, counted: bool = True
    ) -> Future[None]:
        """Begin to read a chunk after its last write; if not `counted`, the ledger has it."""
        self.require()
        before, size = extent.writes.pop(chunk, None), extent.chunk_bytes(chunk)
        if counted:
            self._count("disk", "host", buffer, size)
        return self._threads.submit(self._read, extent, chunk, buffer, before)

    def begin_write(
        self, extent: Extent, chunk: int, buffer: Buffer, ready: Callable[[], object] = lambda: None
    ) -> None:
        """Begin to write `buffer` once `ready()` returns, and give it back after that."""
        self.require()
        before, size = extent.writes.get(chunk), extent.chunk_bytes(chunk)
        self._count("host", "disk", buffer, size)
        done = self._threads.submit(self._write, extent, chunk, buffer, ready, before)
        extent.writes[chunk] = done

    def finish(self, request: Future[None]) -> None:
        if not request.done():
            with self.use.spending("waited"):
                wait([request])
        request.result()

    def sync(self) -> None:
        for extent in self.extents:
            extent.sync()
        self.require()

    def drop(self) -> None:
        """Write what was written to the maps, and give back their pages in memory."""
        for extent in self.extents:
            if extent.map is not None:
                extent.map.flush()
                extent.map.madvise(mmap.MADV_DONTNEED)

    def require(self) -> None:
        if self.failed is not None:
            raise self.failed

    def _count(self, src: str, dst: str, buffer: Buffer, size: int) -> None:
        self.ledger.begin(TIER, between(src, dst)).add(buffer.memory, size, peers=0)

    def _read(
        self, extent: Extent, chunk: int, buffer: Buffer, before: Future[None] | None
    ) -> None:
        if before is not None:
            before.result()
        self._transfer(os.preadv, extent, chunk, buffer)

    def _write(
        self,
        extent: Extent,
        chunk: int,
        buffer: Buffer,
        ready: Callable[[], object],
        before: Future[None] | None,
    ) -> None:
        try:
            if before is not None:
                before.result()
            ready()
            self._transfer(os.pwritev, extent, chunk, buffer)
        finally:
            self.release(buffer)

    def _transfer(self, act: Transfer, extent: Extent, chunk: int, buffer: Buffer) -> None:
        if self.dry:
            return
        size, position = extent.chunk_bytes(chunk), extent.position(chunk)
        what = "write" if act is os.pwritev else "read"
        try:
            with self.use.spending("read" if what == "read" else "written", size):
                _move(act, self.file, buffer.view[:size], position)
                if not self.direct:
                    os.posix_fadvise(self.file, position, size, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._fail(what, extent, chunk, str(error.strerror)) from None

    def _fail(self, what: str, extent: Extent, chunk: int, why: str) -> DiskError:
        error = DiskError(
            f"Rank {self.rank} cannot {what} chunk {chunk} of {extent.chunks} of the tensor "
            f"'{extent.name}' in its file in {self.folder} ({why}). The optimizer's state of this "
            "run is lost; checkpoints are not concerned. Resume from the last one, on a disk that "
            "works and has room."
        )
        with self._changed:
            self.failed = self.failed or error
            self._changed.notify_all()
        return error


def _move(act: Transfer, file: int, view: memoryview, position: int) -> None:
    done = 0
    while done < len(view):
        moved = act(file, [view[done:]], position + done)
        if not moved:
            raise OSError(errno.EIO, "the file ends before the chunk")
        done += moved


def open_unnamed(folder: Path, rank: int, instead: str) -> int:
    """A new file in `folder` that has no name.  Raises InputError; `instead` is for its text."""
    if not folder.is_dir():
        given = f"the folder {folder}, which is {'no folder' if folder.exists() else 'not there'}"
        raise bad(given, "a folder that exists and may be written", instead)
    try:
        with tempfile.TemporaryFile(prefix=f"shardwise-rank{rank}-", dir=folder) as file:
            return os.dup(file.fileno())
    except OSError as error:
        given = f"the folder {folder}, in which no file can be made ({error.strerror})"
        raise bad(given, "a folder that exists and may be written", instead) from None


def set_direct(file: int) -> bool:
    """Set O_DIRECT if the file system takes it; whether it does."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    block = mmap.mmap(-1, ALIGN_BYTES)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
        os.pwritev(file, [block], 0)
        os.preadv(file, [block], 0)
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return hasattr(os, "O_DIRECT")


# --- how a disk is used ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Used:
    """Bytes and seconds; `-` gives what was used between two moments."""

    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    written_s: float = 0.0
    busy_s: float = 0.0
    waited_s: float = 0.0
    updated_s: float = 0.0

    def __sub__(self, before: "Used") -> "Used":
        return Used(**{name: value - vars(before)[name] for name, value in vars(self).items()})


class DiskUse:
    """Counts requests of several threads, and the time in which at least one is under way."""

    def __init__(self) -> None:
        self.total = defaultdict[str, Any](int)
        self.since: dict[str, float] = {}
        self.requests = Counter[str]()
        self.lock = threading.Lock()

    @contextmanager
    def spending(self, what: str, size_bytes: int = 0) -> Iterator[None]:
        """Around a request for so many bytes, or a part of a step."""
        clocks = [what, "busy"] if size_bytes else [what]
        self._change(clocks, 1)
        try:
            yield
        finally:
            self._change(clocks, -1)
            if size_bytes:
                with self.lock:
                    self.total[f"{what}_bytes"] += size_bytes

    def _change(self, clocks: Sequence[str], by: int) -> None:
        with self.lock:
            now = time.perf_counter()
            for clock in clocks:
                self.total[f"{clock}_s"] += now - self.since[clock] if self.requests[clock] else 0
                self.since[clock] = now
                self.requests[clock] += by

    @property
    def so_far(self) -> Used:
        with self.lock:
            return Used(**self.total)
