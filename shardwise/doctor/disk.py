"""The bandwidth of a disk: a file written with fsync, dropped from the page cache, and read."""

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardwise.core.errors import bad

FILE_BYTES: Final = 256 * 2**20
CHUNK_BYTES: Final = 4 * 2**20


@dataclass(frozen=True)
class Disk:
    """Bytes a second of one stream."""

    folder: str
    write_bytes_per_s: float
    read_bytes_per_s: float


def measure(folder: Path, file_bytes: int = FILE_BYTES) -> Disk:
    """Write and read a file of `file_bytes` in `folder`, and remove it.

    Raises InputError for a folder that is not there, is full, or cannot be written.
    """
    if not folder.is_dir():
        raise bad(f"--disk {folder}, which is no folder", "a folder that exists", "--disk .")
    free = shutil.disk_usage(folder).free
    if free < 2 * file_bytes:
        given = f"--disk {folder}, with {free / 2**20:.0f} MiB free"
        raise bad(given, f"a folder with {2 * file_bytes / 2**20:.0f} MiB free", "--disk /tmp")
    chunk = os.urandom(min(CHUNK_BYTES, file_bytes))
    count = max(1, file_bytes // len(chunk))
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return _timed(str(folder), file.fileno(), chunk, count)
    except OSError as error:
        given = f"--disk {folder}, which cannot be written ({error.strerror})"
        raise bad(given, "a folder that this process may write to", "--disk /tmp") from None


def _timed(folder: str, file: int, chunk: bytes, count: int) -> Disk:
    began = time.perf_counter()
    for _ in range(count):
        os.write(file, chunk)
    os.fsync(file)
    written_s = time.perf_counter() - began
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # or the reads come from memory
    os.lseek(file, 0, os.SEEK_SET)
    began = time.perf_counter()
    while os.read(file, len(chunk)):
        pass
    read_s = time.perf_counter() - began
    return Disk(folder, count * len(chunk) / written_s, count * len(chunk) / read_s)
