"""A tensor on its way from a disk to the device, chunk by chunk through a disk's buffers.

    begin     reads of the first chunks, into buffers that are free, beside whatever computes
    wait      each chunk in turn: to the device, its buffer free again, the read of a later chunk

Tensors that are read ahead together hold at most half of the buffers, so that what is waited for,
and what is written meanwhile, always finds one.  Bytes are counted when the fetch is begun.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from shardwise.comm.ledger import Ledger
from shardwise.comm.tiers.disk import Buffer, Extent
from shardwise.core.layouts.layout import between
from shardwise.core.tally import TIER

#: Copies a part on the host to a part on the device.
Copy = Callable[[Tensor, Tensor], object]


class Fetch:
    """Brings `extent` to `out`, a flat tensor on the device."""

    def __init__(self, extent: Extent, out: Tensor, copy: Copy, ledger: Ledger) -> None:
        self.extent, self.disk, self.out, self.copy = extent, extent.disk, out, copy
        self.upcoming = deque(range(extent.chunks))
        self.begun: deque[tuple[int, Buffer, Future[None]]] = deque()
        whole = self.disk.memory
        ledger.begin(TIER, between("disk", "host")).add(whole, extent.whole_bytes, peers=0)
        ledger.begin(TIER, between("host", "device")).add(out, out.numel(), peers=0)
        self._read_ahead()

    def wait(self) -> Tensor:
        """Return `out` when all is there.  Raises DiskError."""
        while self.upcoming or self.begun:
            if not self.begun:
                self._read(self.disk.acquire())
            chunk, buffer, read = self.begun.popleft()
            self.disk.finish(read)
            first, last = self.extent.span(chunk)
            self.copy(buffer.tensor(self.out.dtype, last - first), self.out[first:last])
            self.disk.release(buffer)
            self._read_ahead()
        return self.out

    def _read_ahead(self) -> None:
        while self.upcoming and self.disk.free > self.disk.buffers // 2:
            self._read(self.disk.acquire())

    def _read(self, buffer: Buffer) -> None:
        chunk = self.upcoming.popleft()
        read = self.disk.begin_read(self.extent, chunk, buffer, counted=False)
        self.begun.append((chunk, buffer, read))
