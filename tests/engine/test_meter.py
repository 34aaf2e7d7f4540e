"""The meter sees what is live, and what a step leaves behind."""

from typing import Any

import torch
from torch import Tensor

from shardwise.comm.tiers import begin_copy
from shardwise.comm.world import alone
from shardwise.engine.meter import Meter
from tests.predict.model import batch, engine


def test_a_leak_is_found():
    """A tensor the loss keeps is a leak; what made it and its bytes are told."""
    ours, kept = engine(alone(), "fp32"), []

    def keep(module: Any, args: Any, out: Tensor) -> None:
        kept.append(out.detach() * 2)

    ours.model.get_submodule("blocks.1").register_forward_hook(keep)
    meter = Meter(ours)
    for step in range(2):
        with meter:
            ours.step(batch(ours, "gpt", step))
    (leak,) = meter.leaks()
    assert leak.made_by == "aten.mul.Tensor"
    assert leak.stored_bytes == 2 * 8 * 64 * 4
    assert leak.place.category == "activations"


def test_freed_storages_count_nothing():
    """A storage shrunk to nothing counts nothing; grown again, it counts."""
    ours = engine(alone(), "fp32")
    with Meter(ours) as meter:
        x = torch.zeros(1000)
        x.untyped_storage().resize_(0)
        without = sum(meter.now().values())
        x.untyped_storage().resize_(4000)
        assert sum(meter.now().values()) == without + 4000


def test_host_memory_is_apart():
    """What is copied to the host is host memory, also what is computed there; no peak has both."""
    ours = engine(alone(), "fp32")
    with Meter(ours) as meter:
        before = meter.peak_bytes
        x = torch.zeros(1000)
        there = begin_copy(x, ours.world.tiers, "device", "host").wait()
        twice = there * 2
        back = begin_copy(there, ours.world.tiers, "host", "device").wait()
        assert meter.peak_bytes == before + 2 * 4000
        assert meter.host_peak["activations"] == meter.host_bytes == 2 * 4000
        found = {place.tier: n for place, n in meter.now().items() if not place.unit}
        assert found["host"] == found["device"] == 8000
    del twice, back
    whole, moved = ours.memory(), ours.flats[0].shard.untyped_storage().nbytes()
    ours.world.tiers.own(ours.flats[0].shard)
    assert ours.host_memory() == dict.fromkeys(whole, 0) | {"parameters": moved}
    assert ours.memory() == whole | {"parameters": whole["parameters"] - moved}
