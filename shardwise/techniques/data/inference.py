"""State that outlives torch.inference_mode.

A tensor made in this mode can never be written to, or take part in training, outside of it.  So
whatever stays after a call (units, traces, buffers) is made in normal mode without gradients.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def normal_mode() -> Iterator[None]:
    """Under inference mode: leave it, without gradients; else nothing changes."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def renew_buffers(modules: Iterable[nn.Module]) -> None:
    """Replace buffers that were made under inference mode by copies that may be written to."""
    for module in modules:
        for key, b in module._buffers.items():
            if b is not None and b.is_inference():
                module._buffers[key] = b.clone()
