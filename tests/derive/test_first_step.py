"""The comparison in the first step: no derived table is wrong without a word."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import RankError
from shardwise.techniques.tensor import first_step
from tests.pool import run_gloo, run_threads

WIDTH, HIDDEN = 6, 8


class Pair(nn.Module):
    """Two layers; `length`: the code divides by the number of features between them."""

    def __init__(self, length: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.drop, self.length = nn.Dropout(0.5), length

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        return self.drop(self.down(h / h.shape[-1] if self.length else h))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().mean()


def trained(
    world: World, plan: str, length: bool, derived: bool = True, device: str = "cpu"
) -> list[float]:
    """The losses of two steps under a derived table; `derived` False: taken as the user's own."""
    x = torch.arange(4.0 * WIDTH).view(4, WIDTH).sin()
    with torch.device(device):
        model = Pair(length)
    table = sw.derive_table(model, x, 2, loss).table
    assert table.derived
    table = replace(table, derived=derived)
    engine = sw.parallelize(model, plan, world, optimizer=sw.SGD(lr=0.1), loss=loss, table=table)
    engine.model.eval()
    return [engine.step(x).loss for _ in range(2)]


@pytest.mark.parametrize("derived", [True, False])
@pytest.mark.parametrize("plan", ["tp2", "tp2 dp2 zero3 accumulate:2", "tp2 pp2 1f1b:2"])
def test_a_length_of_sharded_features_is_found(plan: str, derived: bool):
    """`h / h.shape[-1]` divides by a rank's features: no update is made, and the error says why."""
    ranks = 4 if plan != "tp2" else 2
    said = f"a {'derived table' if derived else 'table of styles'} under"
    with pytest.raises(RankError, match=said) as error:
        run_threads(ranks, trained, plan, True, derived)
    assert "in the first step" in error.value.text


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("plan", ["tp2", "tp2 dp2 zero3 bf16", "tp2 pp2 1f1b:2"])
def test_a_table_that_is_right_trains_on(plan: str, device: str):
    """In every precision and composition, with weights made on the meta device, and dropout."""
    run = run_threads if device == "cpu" else run_gloo  # threads share the generator of weights
    losses = run(2 if plan == "tp2" else 4, trained, plan, False, True, device)
    assert all(own == losses[0] for own in losses)
    alone = run_threads(1, trained, "bf16" if "bf16" in plan else "dp1", False, True, device)
    if device == "meta":
        assert losses[0] == pytest.approx(alone[0], rel=2e-2 if "bf16" in plan else 1e-5)


def test_too_little_memory_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Two ranks of a host with too little for both compare nothing, and one line says so."""
    monkeypatch.setattr(first_step, "free_bytes", lambda _: (7, 2 * 880 - 1))
    run_threads(2, trained, "tp2", True)
    said = capsys.readouterr().err
    assert said.count("is not compared") == 1
    assert "needs 880 bytes" in said  # 2 copies of 2 x 6 x 8 + 6 + 8 numbers


def test_the_comparison_costs_nothing_in_later_steps():
    """Its bytes are those of the first step, and its copies are gone after it."""

    def steps(world: World) -> tuple[list[int], bool]:
        x = torch.arange(4.0 * WIDTH).view(4, WIDTH).sin()
        model = Pair(length=False)
        table = sw.derive_table(model, x, 2, loss).table
        engine = sw.parallelize(model, "tp2", world, loss=loss, table=table)
        sent = []
        engine.model.eval()  # threads share the generator that dropout draws from
        for _ in range(3):
            engine.step(x)
            compared = (t.sent_bytes for k, t in engine.sent().items() if k.phase == "compare")
            sent.append(sum(compared) - sum(sent))
            assert not any(k.phase == "compare" for k in engine.last)
        return sent, engine.consistency.before_first is None

    for sent, done in run_threads(2, steps):
        assert done
        assert sent[0] > 0
        assert sent[1:] == [0, 0]
