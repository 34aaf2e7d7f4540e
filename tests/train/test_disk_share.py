"""What a run says of its disk at the end, and what does not count as memory."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.plan import Plan
from shardwise.models.gpt import SIZES, parameters
from shardwise.train.disk_share import disk_share
from shardwise.train.sizes import state_bytes
from tests.pool import run_gloo


def said(world: World, folder: str, words: str) -> str:
    """One step, and what rank 0 says."""
    engine: Any = sw.parallelize(
        torch.nn.Linear(4, 4),
        f"dp2 zero2 {words}",
        world,
        loss=lambda model, x: model(x).square().mean(),
        offload_folder=folder,
    )
    engine.step(torch.ones(2, 4))
    return disk_share(engine, 2**20)


def test_the_bandwidth_of_both_ranks_and_its_share(tmp_path: Path) -> None:
    """On rank 0, with the folder; nothing where no states are on a disk."""
    first, second = run_gloo(2, said, str(tmp_path), "offload:optim@disk")
    pattern = r"disk .*: 0 MiB read and 0 written by 2 ranks, \d+ MiB/s while in use, \d+% of the"
    assert re.match(pattern, first)
    assert str(tmp_path) in first
    assert second == ""
    assert run_gloo(2, said, str(tmp_path), "") == ["", ""]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "each"),
    [
        ("dp2 zero2 offload:optim", 2 * 4 + 4 + 8),
        ("dp2 zero2 offload:optim@disk", 2 * 4),
        ("dp2 zero3 offload:param@disk", 0),
        ("dp1 bf16 offload:param@disk", 0),
    ],
)
def test_what_rests_on_a_disk_needs_no_memory(words: str, each: int) -> None:
    """Bytes a parameter on all ranks: a run that does not fit the memory may rest on a disk."""
    sizes, plan = SIZES["tiny"], Plan.parse(words)
    assert state_bytes(sizes, plan) == each * parameters(sizes)
