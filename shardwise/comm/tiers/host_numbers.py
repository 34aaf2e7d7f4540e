"""Numbers that go to the device and back without a wait for the work that it has been given.

    x = doubles_on([1.0, 7.0], device)                    a copy to the device is queued
    numbers = HostNumbers(begin_sum(x, axis), device)     and one to the host
    ...                                                   an update, the next forward
    numbers.read()                                        waits for the second copy alone

`torch.tensor(numbers, device=device)`, `item` and `tolist` would wait for all queued work.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.comm.transport import Pending


def doubles_on(numbers: Sequence[float], device: torch.device) -> Tensor:
    """The numbers as doubles on `device`."""
    pinned = device.type == "cuda"
    host = torch.tensor(numbers, dtype=torch.float64, device="cpu", pin_memory=pinned)
    return host.to(device, non_blocking=True)


class HostNumbers:
    """The result of `arriving`, on its way to the host."""

    def __init__(self, arriving: Pending[Tensor], device: torch.device) -> None:
        self.copied: torch.cuda.Event | None = None
        self.numbers = arriving.wait()
        if device.type == "cuda":
            self.numbers = self.numbers.to("cpu", non_blocking=True)  # pinned
            self.copied = torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(device))

    @property
    def ready(self) -> bool:
        """Whether they are on the host already, on every rank: without a GPU."""
        return self.copied is None

    def read(self) -> list[float]:
        """The numbers."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.numbers.tolist()
