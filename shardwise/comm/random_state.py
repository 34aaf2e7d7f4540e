"""The states of torch's default generators, which all random numbers of a rank follow from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Torch's default generators, which functions on `device` draw from."""
    index = device.index or 0
    gpu = [torch.cuda.default_generators[index]] if device.type == "cuda" else []
    return [torch.default_generator, *gpu]


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's default generators; afterwards they continue from where they were."""
    with kept(device) as generators:
        for generator in generators:  # torch.manual_seed walks the stack for each device
            generator.manual_seed(seed)
        yield


@contextmanager
def drawing_from(device: torch.device, states: Sequence[Tensor]) -> Iterator[None]:
    """Draw from these states; afterwards the generators continue from where they were."""
    with kept(device) as generators:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        yield


@contextmanager
def kept(device: torch.device) -> Iterator[list[torch.Generator]]:
    """Let torch's default generators continue afterwards from where they are now."""
    generators = generators_of(device)
    before = [generator.get_state() for generator in generators]
    try:
        yield generators
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
