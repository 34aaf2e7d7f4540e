"""The bound on a rank's device memory (`device_memory:256MiB`), checked while a step runs.

On CUDA torch's allocator has the bound: it raises torch.OutOfMemoryError. Elsewhere `DeviceBound`
raises the same error when storages of the device exceed the bound after an operation.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.engine.meter import Meter, Storage, by_category

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

#: What the error says of the bound, before its bytes.
EXCEEDED = "where device_memory allows"


def device_bound(engine: "Engine") -> AbstractContextManager[Any]:
    """What a step of `engine` is run in; enter it once for each step."""
    bound_bytes, device = engine.plan.device_memory_bytes, engine.world.device
    if bound_bytes is None:
        return nullcontext()
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, bound_bytes / total), device)
        return nullcontext()
    return DeviceBound(engine, bound_bytes)


class DeviceBound(TorchDispatchMode):
    """Raises torch.OutOfMemoryError after an operation if more than `most_bytes` are live.

    A count visits all storages, which takes longer than most operations. Nothing says when one is
    freed, but what is made is known:

        live now  <=  live at the last count + made or enlarged since  =  at_most_bytes

    So it counts only where `at_most_bytes` exceeds the bound, and raises exactly where it would if
    it counted each time. Apart from operations, only units make storages larger: they resize
    those that they freed, which have no bytes at the last count (`empty`). Operations of the thread
    that updates states in host memory are not seen here. It makes the optimizer's states, so until
    these exist storages are counted after each operation.
    """

    def __init__(self, engine: "Engine", most_bytes: int) -> None:
        super().__init__()
        self.engine, self.meter, self.most_bytes = engine, Meter(engine), most_bytes
        self.at_most_bytes, self.empty = 0, list[Storage]()
        self.counts_always = False  # in this step

    def __enter__(self) -> Self:
        self.counts_always = self.engine.updates.makes_states_on_host
        self._count()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self.at_most_bytes += self.meter.track(func, args, made)
        self.at_most_bytes += sum(storage.growth_bytes() for storage in self.empty)
        if self.counts_always or self.at_most_bytes > self.most_bytes:
            self._count()
        return made

    def _count(self) -> None:
        """Count the bytes that are live on the device, and raise if they exceed the bound."""
        every = self.meter.now()
        places = {place: count for place, count in every.items() if place.tier == "device"}
        self.empty = [each for each in self.meter.storages.values() if not each.counted_bytes]
        self.at_most_bytes = sum(places.values())
        if self.at_most_bytes > self.most_bytes:
            raise torch.OutOfMemoryError(
                f"{self.at_most_bytes:,} bytes on the device, {EXCEEDED} {self.most_bytes:,}: "
                + ", ".join(f"{name} {count:,}" for name, count in by_category(places).items())
            )
