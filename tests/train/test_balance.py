"""A gate that is badly balanced at the start of a run on the embedded text becomes even."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.comm.world import World, alone
from shardwise.engine.engine import Engine
from shardwise.models import decoder
from shardwise.models.initial import initial
from shardwise.techniques.data.flat.initial_weights import Fill
from shardwise.techniques.expert.apply import layers_of
from shardwise.train import config, loop
from shardwise.train.measure import experts
from shardwise.train.measure.metrics import read
from shardwise.train.prepare import PreparedRun


def settings(folder: Path, cache: Path, gate: str, *, balanced: bool) -> config.Config:
    """160 steps of 2,048 bytes on a model of one layer, with the defaults of the gate."""
    sizes = {"layers": 1, "width": 32, "heads": 2, "hidden": 32, "sequence": 64}
    by_loss = balanced and gate == "switch"
    own = {"experts": 8, "gate": gate} | ({} if by_loss else {"balance": 0.0})
    steps = {"steps": 160, "batch": 32, "lr": 3e-3, "warmup": 1, "decay": "constant"}
    rare = {"eval_every": 0, "save_every": 0, "eval_sequences": 2}
    return config.build(
        {
            "model": sizes | own,
            "data": {"source": "stdlib", "cache": str(cache)},
            "train": steps | rare,
            "plan": {"text": "fp32"},
            "sample": {"tokens": 0},
            "run": {"folder": str(folder / "run"), "trackers": [], "device": "cpu"},
        }
    )


def skewed(name: str, tensor: Tensor) -> None:
    """Initial weights; the logits of the first expert are five times as large as the others'."""
    initial(name, tensor, 0)
    if name.endswith("router.weight"):
        with torch.no_grad():
            tensor[0] *= 5.0


def filled(*_: object) -> Fill:
    return skewed


def without_bias(prepared: PreparedRun, world: World) -> Engine:
    engine = BUILD(prepared, world)
    for layer in layers_of(engine.model).values():
        layer.bias_rate = 0.0
    return engine


BUILD = loop.build


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokens of the embedded text, which all runs read."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.full
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("gate", ["switch", "sigmoid"])
def test_a_badly_balanced_gate(
    gate: str, balanced: bool, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """The loss or the bias brings the busiest expert below 1.5 times the mean; else it stays."""
    monkeypatch.setattr(decoder, "fill", filled)
    if not balanced:
        monkeypatch.setattr(loop, "build", without_bias)
    given = settings(tmp_path, cache, gate, balanced=balanced)
    loop.train(given, alone())
    found = read(given.folder)
    first, last = (experts.sum_loads(part) for part in experts.first_and_last(found))
    at_start, ended = experts.busiest(experts.sum_loads(found[:1])), experts.busiest(last)
    print(f"{gate}: {at_start:.2f} at first, {experts.busiest(first):.2f}, {ended:.2f} at the end")
    assert at_start > 1.9
    assert experts.busiest(first) > 2.0
    assert (ended <= 1.5) == balanced
