"""`tile:N`: linear layers that are gathered, used and freed in tiles of their rows."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.engine.options import EngineOptions
from shardwise.models import gpt
from shardwise.observe.measured_timeline import measuring, predict_events
from shardwise.observe.meter import Meter
from tests.engine.cases import (
    Case,
    Task,
    build,
    rows_task,
    settled,
    small_gpt,
    text,
    tied_gpt,
)
from tests.engine.tensors import holds
from tests.engine.test_timeline import check
from tests.pool import run_threads

# --- memory --------------------------------------------------------------------------------------


def wide() -> nn.Module:
    """A classifier whose last layer has nearly all of its parameters."""
    return settled(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2048)))


def classes(rank: int) -> tuple[Tensor, Tensor]:
    """64 rows, and the class of each."""
    own = torch.Generator().manual_seed(rank)
    return torch.randn(64, 6, generator=own), torch.randint(0, 2048, (64,), generator=own)


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def peaks(world: World, plan: str) -> tuple[Any, ...]:
    """The events of a step, predicted and measured; the most bytes of all categories; leaks."""
    options: dict[str, Any] = {
        "loss": class_loss,
        "least_unit_bytes": 0,
        "optimizer": sw.SGD(lr=0.1),
    }
    engine = sw.parallelize(wide(), plan, world, **options)
    batch = classes(world.rank)
    meter = Meter(engine)
    for _ in range(3):
        with meter:
            engine.step(batch)
    world.barrier()  # until then the other thread may hold a message of this one
    gc.collect()
    leaks = meter.leaks()
    with measuring(engine, batch) as measured:
        engine.step(batch)
    _, predicted = predict_events(wide(), plan, batch, EngineOptions(**options), rank=world.rank)
    return (measured.events, predicted), meter.peak_bytes, leaks


@pytest.mark.full
def test_the_peak_falls_with_the_number_of_tiles():
    """Gathered weights, gradients and logits: predicted, measured, and less with more tiles."""
    most: list[tuple[int, int]] = []
    for words in ("", "tile:4", "tile:16"):
        ranks = run_threads(2, peaks, f"dp2 zero3 fp32 {words}")
        check([events for events, _, _ in ranks])
        assert all(leaks == [] for _, _, leaks in ranks)
        (_, predicted), peak, _ = ranks[0]
        most.append((max(event.total for event in predicted), peak))
    for more, fewer in zip(most[1:], most, strict=False):
        assert more[0] < fewer[0] and more[1] < fewer[1]


# --- names, checkpoints, values ------------------------------------------------------------------


def test_names_and_identity_are_kept():
    """Parameters and keys are those of the plain model; optimizer groups match their names."""
    model = small_gpt()
    before = dict(model.named_parameters())
    spec = sw.AdamW(lr=0.1, groups={"head.*": {"lr": 0.0}})
    engine = sw.parallelize(
        model, "offload:param tile:3 fp64", alone(), optimizer=spec, loss=gpt.loss
    )
    assert {name: id(p) for name, p in before.items()} == {
        name: id(p) for name, p in model.named_parameters()
    }
    engine.step(text(0))
    plain, found = small_gpt().double(), sw.full_state_dict(engine)
    assert list(found) == list(plain.state_dict())
    assert torch.equal(found["head.weight"], plain.state_dict()["head.weight"])
    assert not torch.equal(found["embed.weight"], plain.state_dict()["embed.weight"])


class Perceptron(nn.Module):
    """Layers with biases, one of them frozen, in blocks with parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.7))
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.up(x).tanh())


def perceptron() -> nn.Module:
    return settled(Perceptron())


@pytest.mark.parametrize("plan", ["dp2 zero3 tile:2", "dp2 zero3 tile:3=*.up,last recompute:full"])
def test_biases_and_parameters_around_tiles(plan: str):
    """Biases are in tiles too; a layer's output that no cross-entropy takes is computed whole."""
    holds(run_threads, rows_task(perceptron), Case(f"{plan} fp64", clip=0.5))


# --- errors --------------------------------------------------------------------------------------


def test_layers_by_default():
    """Layers with half the weights of the largest one, in as many tiles; no tied head."""
    for make, wanted in ((small_gpt, ["head", "gate", "up", "down"]), (tied_gpt, ["gate"])):
        engine = build(alone(), Task(make), Case("offload:param tile:2 fp32"))
        tiled = {unit.name.split(".tiles")[0] for unit in engine.data.units.order}
        tiled = {n for n in tiled if hasattr(engine.model.get_submodule(n), "tiles")}
        assert all(any(n.endswith(end) for n in tiled) for end in wanted)
        tiles = [engine.model.get_submodule(f"{n}.tiles") for n in tiled]
        assert all(len([*each.children()]) == 2 for each in tiles)
        assert ("head" in tiled) == (make is small_gpt)
