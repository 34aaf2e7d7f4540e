"""Live memory as it is found: nothing is left over, and nothing that is kept goes unseen."""

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor, nn

from shardwise.comm.world import World
from shardwise.core.garbage import collect
from shardwise.core.plan import Plan
from shardwise.engine.engine import Engine
from shardwise.engine.live import Live, Stray
from shardwise.engine.optimizer_spec import AdamW
from shardwise.engine.parallelize import parallelize
from shardwise.models.gpt import GPTConfig
from shardwise.models.registry import of_gpt
from shardwise.parallel.data import flat_parameter
from shardwise.parallel.data.flat_parameter import Flat
from tests.pool import run_gloo, run_threads

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


PLANS = [
    *("dp2 fp64", "dp2 zero1 bf16", "dp2 zero2 fp16 accumulate:2", "dp2 zero3 fp32"),
    *("tp2 fp64", "tp2 sp bf16", "pp2 1f1b:4 fp64", "pp2 zb-v:4 bf16", "pp2 pipedream:4 fp32"),
    *("dp_replicate2 dp_shard2 zero3", "dp2 tp2 zero3 fp16", "pp2 dp2 zero1 gpipe:2"),
    "pp2 tp2 sp 1f1b:4",
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", PLANS)
def test_nothing_is_left_over(plan: str):
    """After each step every storage that was made and is alive is in a category."""
    ranks = Plan.parse(plan).size
    assert run_threads(ranks, strays, plan, 2) == [[[]] * 2] * ranks


@pytest.mark.parametrize("plan", ["dp2 zero3 bf16", "tp2 sp", "pp2 1f1b:4"])
def test_nothing_is_left_over_between_processes(plan: str):
    """The same where messages go through shared memory and gloo."""
    assert run_gloo(2, strays, plan, 2) == [[[]] * 2] * 2


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


def test_a_leak_of_every_step_grows():
    """All weights of each step: once as much after one, three times after three."""
    step = Engine.step

    def leaking(self: Engine, batch: Any) -> Any:
        done = step(self, batch)
        keep([flat.shard.clone() for flat in self.flats])
        return done

    with patch.object(Engine, "step", leaking):
        found = run_threads(2, strays, "dp2 zero1", 3)
    KEPT.clear()
    for rank in found:
        first, *later = [sum(stray.stored_bytes for stray in after) for after in rank]
        assert later == [2 * first, 3 * first] and first > 0
