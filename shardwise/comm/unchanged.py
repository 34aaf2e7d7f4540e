"""What a call changes while it runs, and restores at its end."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.tools.tree import leaves


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Set every module of `models` to eval mode; afterwards each has the mode that it had."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            if module.training is not training:
                module.train(training)  # may be the program's own, which does more
        for module, training in modes:
            module.training = training


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of `model` at the end, as if nothing had run."""
    tables = [module._buffers for module in model.modules()]
    before = [dict(table) for table in tables]
    values = {b: b.detach().clone() for table in before for b in table.values() if b is not None}
    try:
        yield
    finally:
        for b, value in values.items():
            b.data.copy_(value)
        for table, old in zip(tables, before, strict=True):
            table.update(old)


@contextmanager
def kept_values(batch: Any) -> Iterator[None]:
    """Restore tensors of `batch` that a forward writes and that need no gradient."""
    found = [x for x in leaves(batch, Tensor, objects=True) if not x.is_inference()]
    before = [(x, x._version, x.detach().clone()) for x in found]
    yield
    for x, version, value in before:
        if x._version != version:
            x.data.copy_(value)


# --- torch's random generators --------------------------------------------------------------------


def generators_of(device: torch.device) -> list[torch.Generator]:
    index = device.index or 0
    gpu = [torch.cuda.default_generators[index]] if device.type == "cuda" else []
    return [torch.default_generator, *gpu]


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    with kept(device) as generators:
        for generator in generators:  # torch.manual_seed walks the stack for each device
            generator.manual_seed(seed)
        yield


@contextmanager
def drawing_from(device: torch.device, states: Sequence[Tensor]) -> Iterator[None]:
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


# --- inference mode -------------------------------------------------------------------------------
#
# A tensor made in torch.inference_mode can never be written to, or take part in training, outside
# of it. So state that outlives a call (units, traces, buffers) is made in normal mode.


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
