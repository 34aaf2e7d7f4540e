"""The bound on a rank's device memory (`device_memory:256MiB`), checked while a step runs.

On CUDA torch's allocator has the bound: it raises torch.OutOfMemoryError. Elsewhere a meter adds up
live storages of the device after each operation (meter.py) and raises the same error.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from shardwise.engine.meter import Meter

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine


def device_bound(engine: "Engine") -> AbstractContextManager[Any]:
    """What a step of `engine` is run in; enter it once for each step."""
    bound_bytes, device = engine.plan.device_memory_bytes, engine.world.device
    if bound_bytes is None:
        return nullcontext()
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, bound_bytes / total), device)
        return nullcontext()
    return Meter(engine, bound_bytes)
