"""Masks of dropout that are equal, or differ, on the wrong ranks are refused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from shardwise.comm.world import World
from shardwise.core.plan import Plan
from shardwise.engine import rng
from shardwise.engine.consistency import CHECKED_STEPS
from shardwise.engine.pipelined import Pipelined
from shardwise.engine.rng import ShardedRandom
from shardwise.verify.batches import ragged
from shardwise.verify.draws import compare_draws
from shardwise.verify.finding import Errors
from shardwise.verify.parity import engine_of, equal_share
from tests.pool import run_gloo
from tests.verify import micro


@dataclass(frozen=True)
class Sabotage:
    """What replaces a method of an owner: `act(real, *args)`, named because ranks are processes."""

    plan: str
    owner: Any
    name: str
    act: Callable[..., Any]


def _first(real: Any, random: ShardedRandom, device: Any) -> Any:
    random.drew = random.drew and not random.seen
    return real(random, device)


SABOTAGES = {
    "shards draw the same": Sabotage(
        "tp2 sp", rng, "seeded", lambda real, device, seed: real(device, seed // 2)
    ),
    "copies draw different ones": Sabotage(
        "tp2", ShardedRandom, "_mark", lambda real, random, _, *args: real(random, True, *args)
    ),
    "only the first pass draws apart": Sabotage("tp2", ShardedRandom, "during", _first),
    "microbatches draw the same": Sabotage(
        "pp2 1f1b:4",
        Pipelined,
        "_microbatch",
        lambda real, run, k, part, tokens, seed: real(run, k, part, tokens, seed - 1_000_003 * k),
    ),
}


def compared(world: World, plan: str, what: str) -> Errors:
    """The masks on this rank, under a sabotage or none."""
    read = Plan.parse(f"{plan} fp64")
    model = ragged(micro.find("gpt"), read)
    sabotage = SABOTAGES.get(what)
    if sabotage is None:
        return _compared(world, read, model)
    real = getattr(sabotage.owner, sabotage.name)
    act = sabotage.act
    with patch.object(sabotage.owner, sabotage.name, lambda *args: act(real, *args)):
        return _compared(world, read, model)


def _compared(world: World, plan: Plan, model: Any) -> Errors:
    engine = engine_of(model, plan, world)
    # in a proof it has made more steps than those that compare gradients
    engine.consistency.checked, engine.consistency.every = CHECKED_STEPS, 0
    return compare_draws(engine, equal_share(model, engine, 0), model.plain())


@pytest.mark.parametrize("plan", ["tp2 sp", "tp2", "pp2 1f1b:4", "dp2 tp2"])
def test_the_masks_of_a_plan(plan: str):
    """Tensor ranks draw one mask for what they have in common, and others for their parts."""
    ranks = Plan.parse(plan).size
    assert [found.largest for found in run_gloo(ranks, compared, plan, "")] == [0.0] * ranks


@pytest.mark.parametrize("what", SABOTAGES)
def test_wrong_masks_are_refused(what: str):
    """Each of these would train, with the wrong noise."""
    found = run_gloo(2, compared, SABOTAGES[what].plan, what)
    assert all(one.largest > 1.0 for one in found)
