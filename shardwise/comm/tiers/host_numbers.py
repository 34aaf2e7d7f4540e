"""Numbers that go to the device and back without a wait for the work that it has been given.

    x = doubles_on([1.0, 7.0], device)                    a copy to the device is queued
    numbers = HostNumbers(begin_sum(x, axis).wait())      and one to the host
    ...                                                   an update, the next forward
    numbers.read()                                        waits for the second copy alone

`torch.tensor(numbers, device=device)`, `item` and `tolist` would wait for all queued work.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def doubles_on(numbers: Sequence[float], device: torch.device) -> Tensor:
    """The numbers as doubles on `device`."""
    pinned = device.type == "cuda"
    host = torch.tensor(numbers, dtype=torch.float64, device="cpu", pin_memory=pinned)
    return host.to(device, non_blocking=True)


class HostNumbers:
    """Numbers of the device, on their way to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self.copied: torch.cuda.Event | None = None
        self.numbers = numbers
        if numbers.is_cuda:
            self.numbers = numbers.to("cpu", non_blocking=True)  # pinned
            self.copied = torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(numbers.device))

    @property
    def ready(self) -> bool:
        """Whether they are on the host already, on every rank: without a GPU."""
        return self.copied is None

    def read(self) -> list[float]:
        """The numbers."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.numbers.tolist()
