"""The most layers of a GPT with which a step is predicted to fit a device, its host and a disk.

`optim` and `param` leave a part of these empty; `optim=...` stands for the fraction that fills the
device and the host with whole units:

    device   | unit 1 | unit 2 |      all states; of the others the weights
    host                       | unit 3 | unit 4 | unit 5 | ...
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import torch

import shardwise as sw
from shardwise.models import gpt
from shardwise.models.gpt import GPTConfig
from shardwise.models.registry import of_gpt
from shardwise.observe.kernels import kernels_of
from shardwise.prediction.peak_memory import device_peak_bytes
from shardwise.prediction.prediction import Prediction
from shardwise.techniques.offload.word import share_text

#: Stands for the fraction with which the device and the host are full.
FILLED_HOST: Final = "optim=..."
#: With one layer there is no class of blocks to recompute.
FEWEST: Final = 2


@dataclass(frozen=True)
class Room:
    """What a model is fitted into: bytes by tier, and the batch; `config` without its layers.

    `folder` is on the disk. Neighbours smaller than `least_unit_bytes` are one unit (None: the
    default).
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    config: GPTConfig
    rows: int
    device: str = "cuda"
    folder: str | None = None
    least_unit_bytes: int | None = None


@dataclass(frozen=True)
class Fit:
    """A model of so many layers that is predicted to fit, with its value of `offload:`."""

    layers: int
    offload: str | None


def most_layers(offload: str | None, room: Room) -> Fit:
    """The most layers with which a step is predicted to fit, and for `...` the fraction.

    To one in a hundred: each prediction takes seconds where there are hundreds of layers.
    """
    if offload != FILLED_HOST:
        tiers = zip(_growth(offload, room), _bounds(room), strict=True)
        found = [int((bound - first) / each) for (first, each), bound in tiers if each > 0]
        return Fit(max(0, min(found)), offload)

    def words(layers: int) -> str | None:
        return fraction(predicted("optim", room, layers), room)

    layers = max(FEWEST, _estimate(room))
    step = max(1, layers // 100)
    while layers >= FEWEST and words(layers) is None:
        layers -= step
    while layers >= FEWEST and words(layers + step) is not None:
        layers += step
    return Fit(layers, words(layers)) if layers >= FEWEST else Fit(0, offload)


def _estimate(room: Room) -> int:
    """An estimate of the layers with which the device and the host are full.

    Layers on the host leave their weights on the device, which is full of them and of layers that
    stay there.
    """
    device, host, _ = _bounds(room)
    (first, kept), (_, weights) = (_growth(what, room)[0] for what in (None, "optim"))
    away = host / _growth("optim", room)[1][1]
    most_away = (device - first) / weights
    return int(min(most_away, away + max(0.0, device - first - away * weights) / kept))


def fraction(found: Prediction, room: Room) -> str | None:
    """The value of `offload:` with which the device is as full as can be; None if all do not fit.

    `found` has all states on the host.
    """
    numels = [sum(p.numel for p in unit.params if p.trainable) for unit in found.model.units]

    def words(on_device: int) -> str | None:
        """With all states of so many units on the device."""
        leaving = sum(numels[on_device:]) / sum(numels)
        if leaving in (0, 1):
            return "optim" if leaving else None
        return f"optim={share_text(_rounded_down(leaving))}"

    def fits(tier: int, on_device: int) -> bool:
        changed = replace(found.plan, offload=words(on_device))
        return _by_tier(found.on(0, changed))[tier] <= _bounds(room)[tier]

    every = range(len(numels) + 1)
    device = bisect_left(every, True, key=lambda k: not fits(0, k)) - 1
    return words(device) if device >= 0 and fits(1, device) else None


def _rounded_down(share: float) -> float:
    """The share in six digits, not above it, so that it is that of the same units."""
    return int(share * 10**6) / 10**6


def _growth(offload: str | None, room: Room) -> list[tuple[float, float]]:
    """Of each tier the bytes without layers, and those of each layer."""
    few, more = (_by_tier(predicted(offload, room, layers)) for layers in (2, 4))
    each = [(b - a) / 2 for a, b in zip(few, more, strict=True)]
    return [(a - 2 * layer, layer) for a, layer in zip(few, each, strict=True)]


def _by_tier(found: Prediction) -> tuple[int, int, int]:
    host, disk = (sum(held.values()) for held in (found.host_memory, found.disk_memory))
    return device_peak_bytes(found), host, disk


def _bounds(room: Room) -> tuple[int, int, int]:
    return room.device_bytes, room.host_bytes, room.disk_bytes


@lru_cache(maxsize=16)
def predicted(offload: str | None, room: Room, layers: int) -> Prediction:
    """The prediction for a step of a model with so many layers."""
    config = replace(room.config, layers=layers)
    with torch.device("meta"):
        model = gpt.GPT(config)
    batch = of_gpt("largest", config).batch(room.rows, 0)
    plan, least = f"bf16 {plan_of(offload)}", room.least_unit_bytes
    return sw.predict(
        model,
        plan,
        batch,
        optimizer=sw.AdamW(),
        loss=gpt.loss,
        least_unit_bytes=least,
        device=kernels_of(torch.device(room.device)),
    )


def plan_of(offload: str | None) -> str:
    """The plan text of one rank, without its precision."""
    return "dp1 recompute:full" + f" offload:{offload}" * (offload is not None)
