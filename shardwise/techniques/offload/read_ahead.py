"""Chunks of tensors on a disk, read ahead of their use.

    disk      read 4    read 5                        write 1   write 2
    host                         update 3    update 4
    buffers   [4 4 4 4] [5 5 5 5] [3 3 3 3]   [1 1 1]  [2 2 2]  [free]

All buffers are in one of these three uses, so that the host's memory does not grow with the model.
(ZeRO-Infinity, arXiv 2104.07857, sections 5.1.1 and 6.2: the update of NVMe-resident states.)
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from shardwise.comm.tiers.disk import Buffer, Disk, Extent


@dataclass(frozen=True)
class ChunkRead:
    """The same chunk of several tensors; `key` is the index of their flat parameter."""

    key: int
    chunk: int
    extents: Sequence[Extent]


def read_ahead(disk: Disk, jobs: Sequence[ChunkRead]) -> Iterator[tuple[ChunkRead, list[Buffer]]]:
    """Each job with its chunks in buffers, which the caller writes back or releases.

    While a job is in use, those after it are read into whatever buffers are free. Raises DiskError.
    """
    begun: deque[tuple[ChunkRead, list[Buffer], list[Future[None]]]] = deque()
    upcoming = deque(jobs)
    while upcoming or begun:
        while upcoming and (not begun or disk.free >= len(upcoming[0].extents)):
            job = upcoming.popleft()
            buffers = [disk.acquire() for _ in job.extents]
            pairs = zip(job.extents, buffers, strict=True)
            begun.append((job, buffers, [disk.begin_read(e, job.chunk, b) for e, b in pairs]))
        job, buffers, reads = begun.popleft()
        for read in reads:
            disk.finish(read)
        yield job, buffers
