"""The bandwidth of a disk, as states on it are read and written (comm/tiers/disk.py).

Chunks of CHUNK_BYTES, THREADS requests at a time, with O_DIRECT if the file system takes it.
Without it writes end with fsync, and pages are dropped from the page cache before they are read.
"""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Final

from shardwise.comm.tiers.disk import THREADS, open_unnamed, set_direct
from shardwise.core.buffer_sizes import CHUNK_NUMEL
from shardwise.core.errors import bad

FILE_BYTES: Final = 256 * 2**20
CHUNK_BYTES: Final = 4 * CHUNK_NUMEL  # of 32 bits

Transfer = Callable[[int, list[mmap], int], int]


@dataclass(frozen=True)
class DiskBandwidth:
    """Bytes a second.  `both`: half of the chunks are read while the others are written."""

    folder: str
    write_bytes_per_s: float
    read_bytes_per_s: float
    both_bytes_per_s: float
    direct: bool = True

    @property
    def text(self) -> str:
        """The rates in words."""
        written, read, both = (
            f"{rate / 2**20:.0f} MiB/s"
            for rate in (self.write_bytes_per_s, self.read_bytes_per_s, self.both_bytes_per_s)
        )
        how = "with O_DIRECT" if self.direct else "through the page cache"
        return (
            f"disk {self.folder}: writes {written}, reads {read}, both at once {both} "
            f"(chunks of {CHUNK_BYTES // 2**10} KiB, {THREADS} threads, {how})"
        )


def measure(folder: Path, file_bytes: int = FILE_BYTES, option: str = "--disk") -> DiskBandwidth:
    """Write and read a file of `file_bytes`, or one chunk, in `folder`; nothing is left there."""
    if not folder.is_dir():
        given = f"{option} {folder}, which is no folder"
        raise bad(given, "a folder that exists", f"{option} .")
    free = shutil.disk_usage(folder).free
    if free < 2 * file_bytes:
        given = f"{option} {folder}, with {free / 2**20:.0f} MiB free"
        raise bad(given, f"a folder with {2 * file_bytes / 2**20:.0f} MiB free", f"{option} /tmp")
    file = open_unnamed(folder, 0, f"{option} /tmp")
    try:
        return _measured(str(folder), file, max(1, file_bytes // CHUNK_BYTES))
    except OSError as error:
        given = f"{option} {folder}, which cannot be written ({error.strerror})"
        raise bad(given, "a folder that this process may write to", f"{option} /tmp") from None
    finally:
        os.close(file)


def _measured(folder: str, file: int, chunks: int) -> DiskBandwidth:
    direct = set_direct(file)
    buffers = [mmap(-1, CHUNK_BYTES) for _ in range(THREADS)]
    for buffer in buffers:
        buffer[:] = os.urandom(CHUNK_BYTES)
    os.posix_fallocate(file, 0, chunks * CHUNK_BYTES)

    def rate(act: Callable[[int], Transfer]) -> float:
        """Bytes a second if `act(chunk)` transfers each chunk."""

        def lane(k: int) -> None:
            for chunk in range(k, chunks, THREADS):
                act(chunk)(file, [buffers[k]], chunk * CHUNK_BYTES)

        began = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lane, range(THREADS)))
        if not direct:
            os.fsync(file)
        took_s = time.perf_counter() - began
        if not direct:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return chunks * CHUNK_BYTES / took_s

    rate(lambda _: os.pwritev)  # blocks that were never written are slower
    written, read = rate(lambda _: os.pwritev), rate(lambda _: os.preadv)
    both = rate(lambda chunk: os.pwritev if chunk // THREADS % 2 else os.preadv)
    return DiskBandwidth(folder, written, read, both, direct)
