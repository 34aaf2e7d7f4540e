"""Live memory as it is found: nothing is left over, and nothing that is kept goes unseen."""

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.comm.tiers.tiers import begin_copy
from shardwise.comm.world import World, alone
from shardwise.core.tools.garbage import collect
from shardwise.engine.optimizer.optimizer_spec import AdamW
from shardwise.engine.parallelize import parallelize
from shardwise.models.gpt import GPTConfig
from shardwise.models.registry import of_gpt
from shardwise.observe.live import Live, Stray
from shardwise.observe.meter import Meter
from shardwise.techniques.data.flat import flat_parameter
from shardwise.techniques.data.flat.flat_parameter import Flat
from tests.engine.cases import ranks_of
from tests.pool import run_gloo, run_threads
from tests.predict.model import batch, engine

SMALL = GPTConfig(64, 2, 32, 2, 2, 64, 16)


def strays(world: World, plan: str, steps: int) -> list[list[Stray]]:
    """What is alive after each step and in no category."""
    trainable, live, found = of_gpt("gpt", SMALL), Live(), []
    model = trainable.build()
    with live.of(model):
        engine = parallelize(
            model,
            plan,
            world,
            optimizer=AdamW(lr=1e-3),
            loss=trainable.loss,
            tokens=trainable.tokens,
            units="blocks.*",
        )
    del model
    for step in range(steps):
        batch = trainable.batch(2 * engine.microbatches, step, world.device)
        with live:
            engine.step(batch)
        engine.wait()
        world.barrier()  # ranks in threads read each other's tensors until here
        collect()
        found.append(live.unaccounted(engine))
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "plan", ["dp2 zero3 bf16", "tp2 sp", "pp2 1f1b:4", "pp2 pipedream:4 fp32", "dp2 tp2 zero3 fp16"]
)
def test_nothing_is_left_over(plan: str):
    """After each step every storage that is alive is in a category, messages of gloo too."""
    assert run_gloo(ranks_of(plan), strays, plan, 2) == [[[]] * 2] * ranks_of(plan)


# --- what is kept is found -------------------------------------------------------------------

KEPT: dict[int, list[Any]] = {}  # by thread


def keep(value: Any) -> None:
    """In a list that neither the engine nor the model knows of."""
    KEPT.setdefault(threading.get_ident(), []).append(value)


def as_attribute(flat: Any) -> None:
    flat.copied = flat.shard.clone()


def in_a_list(flat: Any) -> None:
    keep(flat.shard.clone())


def in_a_closure(flat: Any) -> None:
    copied = flat.shard.clone()
    flat.copied = lambda: copied


def in_a_graph(flat: Any) -> None:
    keep((flat.shard.detach().requires_grad_() * 2).square().sum().grad_fn)


@pytest.mark.parametrize("how", [as_attribute, in_a_list, in_a_closure, in_a_graph])
@pytest.mark.parametrize("plan", ["dp2", "dp2 zero3"])
def test_a_clone_of_each_unit_is_found(plan: str, how: Callable[[Any], None]):
    """However it is kept: as many bytes as this rank's shards have, on each rank."""
    made, shards = Flat.__init__, dict[int, int]()

    def init(self: Flat, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        how(self)
        me = threading.get_ident()
        shards[me] = shards.get(me, 0) + self.shard.nbytes

    with patch.object(Flat, "__init__", init):
        found = run_threads(2, strays, plan, 1)
    KEPT.clear()
    for (after,), sharded in zip(found, shards.values(), strict=True):
        assert sum(stray.stored_bytes for stray in after) == sharded > 0


def test_weights_of_before_are_found():
    """A weight that the model came with, and that is kept beside its place in a unit."""
    initialize = flat_parameter.initialize

    def kept(full: Tensor, named: list[tuple[str, nn.Parameter]], *args: Any) -> None:
        keep([p.data for _, p in named])
        initialize(full, named, *args)

    with patch.object(flat_parameter, "initialize", kept):
        found = run_threads(2, strays, "dp2 zero3", 1)
    KEPT.clear()
    assert all(sum(stray.stored_bytes for stray in after) > 0 for (after,) in found)


# --- the meter ----------------------------------------------------------------------------------


def test_a_leak_is_found():
    """A tensor the loss keeps is a leak; the report names what made it, and its bytes."""
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
