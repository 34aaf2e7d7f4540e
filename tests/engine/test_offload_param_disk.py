"""`offload:param@disk`: parameters rest on a disk too, and stream to the device before each use."""

from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.comm.disk import DiskError
from shardwise.comm.world import World
from shardwise.core.plan import Plan
from tests.engine.cases import Case, Task, build, oracle, share, tied_gpt
from tests.engine.offloading import (
    assert_costs,
    assert_parity,
    assert_resumes,
    trained,
    trained_as_one,
)
from tests.engine.test_offload_disk import wide_task
from tests.pool import run_gloo, run_threads

TASK, TIED = Task(), Task(tied_gpt)
WORD = "offload:param@disk"


@pytest.mark.parametrize("plan", [f"pp2 gpipe:2 {WORD}", "dp2 zero3 offload:optim@disk"])
def test_several_chunks(plan: str, monkeypatch: pytest.MonkeyPatch):
    """Chunks so short that each flat parameter has many: parity, and bytes as predicted."""
    monkeypatch.setattr("shardwise.core.chunks.CHUNK_NUMEL", 512)
    case = Case(f"{plan} fp64", clip=0.5)
    results = trained_as_one(run_threads, TIED, case)
    assert_costs(results, on_disk=True)


@pytest.mark.parametrize("before", [f"dp2 zero3 {WORD} bf16", "dp2 zero3 bf16"])
def test_a_checkpoint_in_16_bits(before: str):
    """Saved after two steps under one plan and resumed under another: a run without a stop."""
    assert_resumes(TASK, before, f"dp1 {WORD} bf16")


class Frozen(torch.nn.Module):
    """A frozen layer between two that are trained."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(0)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        for p in self.parameters():
            torch.nn.init.normal_(p, std=0.3, generator=own)
        self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers(x))


@pytest.mark.parametrize("plan", ["dp1", "dp2 zero3"])
def test_frozen_parameters_rest_there_too(plan: str):
    """They are read before each use, and never written."""
    task = Task(Frozen, wide_task(8).batch, wide_task(8).loss, None)
    case = Case(f"{plan} fp64 {WORD}", clip=0.5)
    results = run_threads(Plan.parse(plan).size, trained, task, case)
    assert_parity(results, oracle(task, case), 1e-10)
    assert_costs(results, on_disk=True)


# --- errors ---------------------------------------------------------------------------------------


def failing(world: World, folder: str) -> tuple[str, float]:
    """A step and a checkpoint, then a damaged weight: what is said, and a fresh engine's step."""
    case = Case(f"dp2 zero3 fp64 {WORD}")
    engine = build(world, TASK, case)
    engine.step(share(TASK.batch(0), engine.data_rank, engine.data_ranks))
    sw.save(engine, folder)
    states = engine.optimizer.disk
    assert states is not None
    states.disk.sync()
    weight = states.weights[0]
    assert weight is not None
    weight.tensor[:1].add_(1)
    weight.map.flush()
    states.disk.drop()
    said = ""
    try:
        engine.step(share(TASK.batch(1), engine.data_rank, engine.data_ranks))
    except DiskError as error:
        said = str(error)
    world.barrier()
    again = build(world, TASK, case)
    sw.load(again, folder)
    return said, again.step(share(TASK.batch(1), again.data_rank, again.data_ranks)).loss


def test_a_damaged_weight_is_never_used(tmp_path: Path):
    """The step fails before it computes; the last checkpoint is whole."""
    wanted = oracle(TASK, Case("ddp", steps=2))
    for rank, (said, loss) in enumerate(run_gloo(2, failing, str(tmp_path))):
        assert f"Rank {rank} cannot read chunk 0 of 1 of the tensor 'weight of " in said
        assert loss == pytest.approx(wanted.losses[1], rel=1e-10)
