"""The suites `update`, `disk` and `save`: a step with offload, and with asynchronous saves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import async_save, disk, table, update
from benchmarks.__main__ import bench_command
from benchmarks.contenders.contender import adamw
from benchmarks.stack import parameter_count, stack
from shardwise.checkpoint.folder import find
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from tests.pool import run_gloo

COUNT = 4 * 32 * 32


def updated(_world: World) -> list[update.UpdateLine]:
    assert dist.is_initialized()
    return update.compare(COUNT, rounds=2)


def test_every_contender_makes_the_same_update() -> None:
    """Three steps of AdamW from one gradient: the weights of FSDP2's, in rows with their times."""
    rows = {row.contender: row for row in run_gloo(1, updated)[0]}
    assert list(rows) == [each.name for each in update.CONTENDERS]
    for name, row in rows.items():
        assert row.parameters == COUNT
        if name == "DeepSpeedCPUAdam" and row.update_s is None:
            assert row.note  # not installed, or its kernel cannot be built
            continue
        assert row.update_s and row.ratio and row.with_copies
        assert row.difference is not None and row.difference <= 1e-5
        assert bool(row.copies_s) == name.startswith("offload:")
    assert "difference" in update.as_text([*rows.values()])
    assert len(json.loads(json.dumps(table.as_json([*rows.values()])))["rows"]) == len(rows)


def reference(_world: World, plan: str) -> bool:
    """Whether `plan` makes the update of a plain AdamW."""
    plain, model = stack(COUNT), stack(COUNT)
    optimizer = adamw(plain.parameters())
    gradients = [torch.randn(p.shape) for p in plain.parameters()]
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient.clone()
    (contender,) = (each for each in update.CONTENDERS if each.name == plan)
    own = contender.build(model, update.SETUP)
    for _ in range(3):
        for p, gradient in zip(plain.parameters(), gradients, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        own.step()
    before, found = [*stack(COUNT).parameters()], own.weights()
    assert not torch.equal(before[0], found[0])
    return all(map(torch.allclose, found, plain.parameters()))


@pytest.mark.parametrize("plan", ["offload:optim", "offload:param", update.FSDP2])
def test_the_update_is_a_plain_ones(plan: str) -> None:
    """What is timed is the whole update of all weights."""
    assert run_gloo(1, reference, plan) == [True]


def on_disk(world: World, folder: str) -> list[disk.DiskLine]:
    return disk.compare(world, folder, COUNT, rounds=2, file_bytes=2**20)


def test_the_disk_in_a_step_and_alone(tmp_path: Path) -> None:
    """Both plans, with the bytes of their states, the rates and shares, and where the time goes."""
    rows, others = run_gloo(2, on_disk, str(tmp_path))
    assert rows == others
    assert [row.plan.split()[-1] for row in rows] == list(disk.WORDS)
    for row in rows:
        assert (row.parameters, row.ranks) == (COUNT, 2)
        assert row.written_bytes == 16 * COUNT  # the gradient, the master and two moments
        fetched = row.read_bytes - 16 * COUNT  # weights before their use, the last only once
        assert (0 < fetched <= 8 * COUNT) if "param" in row.plan else fetched == 0
        assert 0 < row.waited_s + row.updated_s <= row.step_s
        assert min(row.read_share, row.write_share, row.both_share) > 0
        assert 0 < row.step_share <= row.both_share
    assert "the disk alone" in disk.as_text(rows)
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_parameters() -> None:
    """Digits with K or M; other text, and wrong words of these suites, are refused."""
    assert [parameter_count(text, "1M") for text in ("100M", "20K", "64")] == [10**8, 20000, 64]
    wrong: list[tuple[list[str], dict[str, Any], str]] = [
        (["update"], {"size": ["small"]}, "--size 100M"),
        (["update", "fsdp2"], {}, "python -m benchmarks update"),
        (["disk"], {}, "python -m benchmarks disk /mnt/nvme"),
        (["disk", "/none"], {}, "python -m benchmarks disk ."),
        (["disk", "/tmp"], {"link": "1gbit"}, "python -m benchmarks disk"),
    ]
    for words, more, instead in wrong:
        with pytest.raises(InputError, match=instead):
            bench_command(words, **more)


def test_saves_are_measured_beside_none(tmp_path: Path) -> None:
    """A row of both ranks' saves, with its times; the newest checkpoint is that of the last."""
    (row, _) = run_gloo(2, async_save.compare, str(tmp_path), COUNT, 2, 2)
    assert (row.plan, row.ranks, row.parameters, row.rounds) == ("dp2 zero3 fp32", 2, COUNT, 2)
    assert min(row.step_s, row.ratio, row.held_s, row.write_s) > 0
    assert find(tmp_path).name == "step-000007" and "dp2 zero3" in async_save.as_text([row])
