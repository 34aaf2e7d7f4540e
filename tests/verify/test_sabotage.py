"""Beside the catalogue of mutations: what else a proof refuses, and where it raises no alarm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.comm.world import World
from shardwise.core.errors import RankError
from shardwise.core.plan.plan import Plan
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer.optimizer import ShardedOptimizer
from shardwise.engine.optimizer.updating import Updates
from shardwise.models.registry import find
from shardwise.verify import comparison, parity
from shardwise.verify import memory_proof as memory
from shardwise.verify.parity import engine_of, prove
from shardwise.verify.report import Report, report
from tests.pool import run_threads

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 64), nn.Linear(64, 48)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(24, 48), Block(), Block(), Block(), nn.Linear(48, 40))
    model.tensor_table = {"*.up": "colwise", "*.down": "rowwise"}
    def batch(rows, seed):
        own = torch.Generator().manual_seed(seed)
        return torch.randn(rows, 24, generator=own), torch.randn(rows, 40, generator=own)
    return model, lambda m, b: (m(b[0]).float() - b[1]).square().mean(), batch
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(MODEL)
    return f"{path}:build"


@pytest.fixture(autouse=True)
def _memory_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one step; of ten steps test_mutations.py and test_command.py tell."""
    monkeypatch.setattr(memory, "READ_AFTER", (1,))


def proved(plan: str, model: str, steps: int = 2) -> Report:
    read = Plan.parse(plan)
    return report(read, model, run_threads(read.size, prove, read, model, steps))


@pytest.mark.full
def test_clipping_that_never_rests_is_refused(model: str, monkeypatch: pytest.MonkeyPatch):
    """In the step with an idle rank the bound is above the norm: gradients must not grow to it."""
    real = Updates.by_norm

    def by_norm(updates: Updates, norm: float, correction: float) -> None:
        real(updates, norm, correction * max(1.0, (updates.clip or 1) / (norm + 1e-6)))

    monkeypatch.setattr(Updates, "by_norm", by_norm)
    first = proved("dp2 fp64", model, 2).first_difference
    assert first is not None and first.kind == "gradients"


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "seed"), [("dp2 zero3 bf16", 1), ("tp2 fp16", 7), ("pp2 2bw:2 bf16", 40)]
)
def test_what_is_right_in_16_bits_holds_and_leaves_no_folder(
    plan: str, seed: int, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """No false alarm, whatever the batches; the checkpoint of the proof is gone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for module in (parity, comparison):
        monkeypatch.setattr(module, "SEED", seed)
    found = proved(plan, model)
    assert found.holds, (found.first_difference, found.uncovered)
    assert not [*tmp_path.iterdir()]


def test_a_moment_that_differs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The optimizer's state is compared, though the weights are right for now."""
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace(".float()", ""))  # in fp64 throughout, so to 1e-10
    real = ShardedOptimizer.step

    def stepped(self: ShardedOptimizer, flats: Any = None, factor: float = 1.0) -> None:
        real(self, flats, factor)
        for state in self.torch.state.values():
            state["exp_avg_sq"].mul_(1 + 1e-6)

    monkeypatch.setattr(ShardedOptimizer, "step", stepped)
    first = proved("dp2 zero1 fp64", f"{path}:build", 1).first_difference
    assert first is not None and first.kind == "optimizer" and "exp_avg_sq" in first.name


def test_copies_that_a_load_left_are_found_by_the_engine(
    model: str, monkeypatch: pytest.MonkeyPatch
):
    """Data ranks compare the weights that they replicate in the first step after it."""
    monkeypatch.setattr(Engine, "loaded", lambda _: None)
    with pytest.raises(RankError, match=r"weight on data rank 1, whose norm is"):
        proved("dp2 zero1 fp64", model, 1)


def units_of(world: World, plan: str) -> int:
    return len({flat.names[0] for flat in engine_of(find("gpt"), Plan.parse(plan), world).flats})


@pytest.mark.parametrize(
    ("plan", "most"), [("dp2 zero3 fp64", False), ("dp2 fp64 bucket:64MiB", True)]
)
def test_blocks_are_units_however_small(plan: str, most: bool):
    """Four blocks of GPT, its embedding, norm and head; one unit where the plan has a bucket."""
    (found, _) = run_threads(2, units_of, plan)
    assert found == 1 if most else found >= 7


def test_the_oracle_is_one_process_s_own_training():
    """Its loss falls, and its gradients are those of autograd, of a batch that is not split."""
    made = find("gpt")
    oracle = parity.alone_of(made, Plan.parse("fp64"), torch.device("cpu")).exact
    losses = [oracle.step(made.batch(3, 5), None) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    whole: dict[str, Tensor] = oracle.weights.used
    assert all(g.dtype is torch.float64 and g.isfinite().all() for g in whole.values())
