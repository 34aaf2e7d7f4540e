"""Pages of files that checkpoints read or write through maps, given back every 128 MiB.

States on a disk (comm/tiers/disk.py) are mapped. Each page that is read, or written, counts as
memory of the process until it is given back. Without this the process grows to the size of the
states.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor

EVERY_BYTES: Final = 2**27


@dataclass
class Pages:
    """Calls `release` after each EVERY_BYTES of tensors that were `seen`."""

    release: Callable[[], None] = lambda: None
    since_bytes: int = 0

    def seen(self, tensor: Tensor) -> None:
        """Count the bytes of a tensor that is about to be read or written, or that was."""
        self.since_bytes += tensor.nbytes
        if self.since_bytes >= EVERY_BYTES:
            self.since_bytes = 0
            self.release()
