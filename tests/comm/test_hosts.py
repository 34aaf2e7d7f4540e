"""Ranks on several hosts: the plans compute the same, and gathers stay inside a host."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from benchmarks.meters.interface import sent_bytes
from shardwise.comm.start.hosts import host_number
from shardwise.comm.world import World
from shardwise.core.plan.plan import Plan
from tests import test_plans as facts
from tests.comm.hosts import joined_hosts
from tests.engine.cases import squares
from tests.plan_runs import OnRanks, run_of
from tests.plans import CANONICAL, LONG
from tests.pool import Pool

pytestmark = pytest.mark.full
#: Every canonical plan of several ranks.
PLANS = [
    plan
    for name, plans in CANONICAL.items()
    for plan in plans
    if name != LONG and Plan.parse(plan).size > 1
]


@pytest.fixture(scope="module")
def across() -> Iterator[OnRanks]:
    """Runs a function on ranks of two hosts, half of them on each; of three, if there are three."""
    with joined_hosts(3) as hosts:
        pools = dict[int, Pool]()

        def on_hosts(ranks: int, function: Any, *args: Any) -> list[Any]:
            if ranks not in pools:
                pools[ranks] = Pool(ranks, hosts=hosts if ranks == 3 else hosts[:2])
            return pools[ranks].run(function, args)

        yield on_hosts
        for pool in pools.values():
            pool.close()


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_computes_the_same_across_hosts(plan: str, across: OnRanks):
    """Parity, bytes and the continued checkpoint are those of ranks on one host."""
    run = run_of(across, plan)
    facts.test_parity(run)
    facts.test_bytes(run)


def counted(world: World, plan: str, steps: int) -> tuple[int, dict[str, int], int]:
    """This rank's host; what the ledger counts in some steps, by axis; what left the host."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    engine = sw.parallelize(model, plan, world, optimizer=sw.SGD(lr=1e-3), loss=squares)
    batch = torch.randn(4, 256)
    engine.step(batch)
    world.barrier()
    before, left = engine.ledger.copy(), sent_bytes("eth0")
    for _ in range(steps):
        engine.step(batch)
    world.barrier()
    lines = engine.ledger.since(before)
    axes = dict.fromkeys((key.axis for key in lines), 0)
    for key, tally in lines.items():
        axes[key.axis] += tally.sent_bytes
    return host_number(), axes, sent_bytes("eth0") - left


def test_hybrid_sharding_gathers_inside_a_host(across: OnRanks):
    """What leaves a host is what its ranks send along the axis of replicas, and headers."""
    found: list[Any] = across(4, counted, "dp_replicate2 dp_shard2 zero3", 20)
    assert [host == found[0][0] for host, _, _ in found] == [True, True, False, False]
    for pair in (found[:2], found[2:]):
        between = sum(axes["dp_replicate"] for _, axes, _ in pair)
        left = max(sent for _, _, sent in pair)
        assert between <= left <= 1.05 * between < sum(axes["dp_shard"] for _, axes, _ in pair)
