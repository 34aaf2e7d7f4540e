"""A disk whose every request takes long: the same training, and the run says that it waits."""

import os
import re
import time
from functools import partial
from typing import Any

import pytest

from shardwise.comm.disk import THREADS
from shardwise.comm.disk_use import Used
from shardwise.comm.world import World
from shardwise.engine.state_dict import full_parameters
from shardwise.train.disk_share import StepsOnDisk, disk_line
from tests.engine.cases import Case, Run, build, difference, oracle, share
from tests.engine.test_offload_disk import wide_task
from tests.pool import run_threads

DELAY_S = 0.002
TASK = wide_task(2048)


def slow_down(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Delay each read and write of a file by DELAY_S; return a list that gets the name of each."""
    made = list[str]()

    def slow(name: str, real: Any, *given: Any) -> int:
        made.append(name)
        time.sleep(DELAY_S)
        return real(*given)

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, partial(slow, name, getattr(os, name)))
    return made


def waiting(world: World, plan: str) -> tuple[Run, Used, int, str]:
    """A training, its use of the disk, the number of chunks of the rank's states, and the words."""
    case, run = Case(plan, clip=0.5), Run()
    engine = build(world, TASK, case)
    steps = StepsOnDisk(engine)
    for step in range(case.steps):
        own = share(TASK.batch(step), world.rank, world.size)
        run.losses.append(engine.step(own).loss)
    used, states = steps.use_in_steps(), engine.optimizer.disk
    assert states is not None
    assert states.disk.free == states.disk.buffers - 1  # the one that widens gradients is kept
    chunks = sum(extent.chunks for extent in states.disk.extents)
    run.weights = full_parameters(engine.flats)
    return run, used, chunks, disk_line(steps, 2**20)


@pytest.mark.parametrize("plan", ["dp2 zero2 offload:optim@disk", "dp2 zero3 offload:param@disk"])
def test_a_slow_disk_is_waited_for(plan: str, monkeypatch: pytest.MonkeyPatch):
    """More chunks than buffers, all slow: parity, no deadlock, and the run says how it waited."""
    monkeypatch.setattr("shardwise.core.chunks.CHUNK_NUMEL", 512)
    made = slow_down(monkeypatch)
    wanted = oracle(TASK, Case("ddp", clip=0.5))
    for run, used, chunks, words in run_threads(2, waiting, f"{plan} fp64"):
        assert run.losses == pytest.approx(wanted.losses, rel=1e-10)
        for name, weight in run.weights.items():
            assert difference(weight, wanted.weights[name]) <= 1e-10, name
        assert used.busy_s >= 3 * chunks * DELAY_S / THREADS  # each chunk is read in each step
        assert used.waited_s > 0 < used.updated_s
        assert words == "" or re.search(r"they waited \d+\.\d of \d+\.\d s for it$", words)
    assert {*made} == {"preadv", "pwritev"}
