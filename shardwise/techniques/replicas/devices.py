"""The devices of replicas: checked before anything is copied to them."""

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.errors import bad

Devices = Sequence[str | int | torch.device]

_EXAMPLE = 'devices=["cpu", "cpu"]'


def as_devices(devices: Devices) -> list[torch.device]:
    """The devices, each with its index.

    A processor may be given several times, since each replica has a thread of its own there; a GPU
    only once, since two replicas on one GPU compute no faster than one and need twice the memory.

    Raises:
        InputError: no devices, one that is not there, a GPU twice, or GPUs beside processors.
    """
    if isinstance(devices, str | int | torch.device) or not isinstance(devices, Sequence):
        raise bad(f"devices={devices!r}", "a list with one device for each replica", _EXAMPLE)
    found = [_device(each) for each in devices]
    if not found:
        raise bad("devices=[]", "a list with one device for each replica", _EXAMPLE)
    kinds = sorted({device.type for device in found})
    if len(kinds) > 1:
        given = f"devices of {len(kinds)} kinds ({' and '.join(kinds)})"
        raise bad(
            given, "devices of one kind, since a step waits for the slowest", _alternative(found)
        )
    twice = next((d for d in found if d.type != "cpu" and found.count(d) > 1), None)
    if twice is not None:
        given = f"devices with {twice} more than once"
        raise bad(given, "each GPU once: one replica uses all of it", _alternative(found))
    return found


def _device(given: Any) -> torch.device:
    """One device; a number is that of a GPU."""
    try:
        device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    except (RuntimeError, TypeError):
        raise bad(f"the device {given!r}", 'names such as "cpu" and "cuda:0"', _EXAMPLE) from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise bad(f"the device {device}", '"cpu", or GPUs: "cuda:0"', _EXAMPLE)
    count = torch.cuda.device_count()
    index = device.index or 0
    if index >= count:
        names = [f"cuda:{i}" for i in range(count)]
        there = ", ".join(names) or "no GPU"
        instead = f"devices={names}".replace("'", '"') if count else _EXAMPLE
        raise bad(f"the device {device}", f"what PyTorch sees here: {there}, and cpu", instead)
    return torch.device("cuda", index)


def _alternative(found: list[torch.device]) -> str:
    names = list(dict.fromkeys(str(d) for d in found if d.type == "cuda")) or ["cpu", "cpu"]
    return f"devices={names}".replace("'", '"')
