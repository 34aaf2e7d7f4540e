"""What is made under torch.inference_mode.

A tensor made there can never be written to, or take part in training, outside of it. So state that
outlives a call (units, traces, buffers) is made in normal mode, without gradients.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def normal_mode() -> Generator[None]:
    """Under inference mode: leave it, without gradients; else nothing changes."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def renew_buffers(modules: Iterable[nn.Module]) -> None:
    """Replace buffers that were made under inference mode by copies that may be written to."""
    for module in modules:
        for key, b in module.named_buffers(recurse=False, remove_duplicate=False):
            if b.is_inference():
                setattr(module, key, b.clone())
