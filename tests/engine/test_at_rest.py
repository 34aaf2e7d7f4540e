"""Parameters at rest have as many dimensions as before, so that a choice by p.ndim is the same."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from tests.engine.cases import (
    Case,
    Task,
    assert_same,
    build,
    difference,
    oracle,
    rows_task,
    settled,
    share,
    train,
    vectors,
)
from tests.engine.loops import rows, wrap
from tests.pool import run_gloo, run_threads

SHARDED = ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"]


class Affine(nn.Module):
    """A parameter of three dimensions, and a scalar that rank 1 holds."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, 1, 6))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift).squeeze(0)


class Dims(nn.Module):
    """Parameters of zero to four dimensions; several ranks hold nothing of some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.conv = nn.Linear(6, 12), nn.Conv2d(3, 5, 2)
        self.norm, self.leave = nn.LayerNorm(5), nn.Linear(5, 6)
        self.last = Affine()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(torch.tanh(self.enter(x)).view(-1, 3, 2, 2)).flatten(1)
        return self.last(self.leave(self.norm(y)))


def dims() -> nn.Module:
    return settled(Dims()).double()


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The usual split: matrices decay, vectors do not; the scalar has a rate of its own."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in named.values() if p.ndim == 1]},
        {"params": [p for p in named.values() if p.ndim == 0], "lr": 0.2},
    ]


def looped(model: nn.Module, optim: Any, shares: list[int], wrapped: bool) -> dict[str, Tensor]:
    for step in range(3):
        for rank in shares:
            loss = model(rows(step, rank)).square().mean()
            (loss if wrapped else loss / len(shares)).backward()
        if wrapped:
            sw.clip_grad_norm(model, 0.3)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optim.step()
        optim.zero_grad()
    return dict(model.state_dict())


def names(model: nn.Module, optim: Any) -> list[list[str]]:
    known = {id(p): name for name, p in model.named_parameters()}
    return [[known[id(p)] for p in group["params"]] for group in optim.param_groups]


def wrapped_loop(world: World, how: str, when: str) -> tuple[dict[str, Tensor], Any, Any]:
    model = dims()
    early = torch.optim.AdamW(two_groups(model), lr=0.05, weight_decay=0.0)
    model = wrap(how, model, world)
    late = torch.optim.AdamW(two_groups(model), lr=0.05, weight_decay=0.0)
    optim = early if when == "before" else late
    found = looped(model, optim, [world.rank], True)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return found, names(model, optim), shapes


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["DDP", *SHARDED])
def test_an_optimizer_with_groups_by_dimensions_trains_as_on_a_plain_module(how: str, when: str):
    """Made before or after the wrapping; with clipping, which reads gradients at rest."""
    ranks = 4 if how == "HYBRID_SHARD" else 2
    plain = dims()
    optim = torch.optim.AdamW(two_groups(plain), lr=0.05, weight_decay=0.0)
    groups, expected = names(plain, optim), looped(plain, optim, list(range(ranks)), False)
    runner = run_gloo if (how, when) == ("FULL_SHARD", "after") else run_threads
    found = runner(ranks, wrapped_loop, how, when)
    for weights, own, shapes in found:
        assert own[0] == groups[0]
        assert own[1] == groups[1] or "last.scale" in own[1]  # [0] where another rank holds it
        for name, p in plain.named_parameters():
            assert difference(weights[name], expected[name]) <= 1e-10, name
            assert len(shapes[name]) == p.dim() or (name == "last.scale" and shapes[name] == (0,))
    holders = [own for _, own, _ in found if own[2] == ["last.scale"]]
    assert holders, "nobody holds the scalar without dimensions"


@pytest.mark.parametrize("plan", ["dp2 zero1", "dp2 zero3"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.ASGD])
def test_optimizers_over_pieces_of_all_dimensions(kind: Any, plan: str):
    """The engine's own: states take the shapes of pieces, some of them empty or without dims."""
    task: Task = rows_task(dims)
    case = Case(plan, kind=kind, options={"lr": 0.01}, clip=1.0)
    assert_same(run_threads(2, train, task, case), oracle(task, case), 1e-10)


def written(world: World, plan: str) -> list[tuple[str, tuple[int, ...], Tensor]]:
    """What this rank would write to a checkpoint after two steps."""
    engine = build(world, rows_task(dims), Case(plan, options={"lr": 0.05}))
    for step in range(2):
        engine.step(share(vectors(step), engine.data_rank, engine.data_ranks))
    boxes = [box for box in engine.boxes() if box.replica == 0]
    return [(box.name, box.offsets, box.tensor.detach().clone()) for box in boxes]


@pytest.mark.parametrize("plan", ["dp2 zero1", "dp2 zero3", "dp4 zero3"])
def test_a_checkpoint_has_the_state_of_every_parameter_once(plan: str):
    """Of a parameter without dimensions the rank that holds it writes the moments."""
    expected = {name: x for name, _, x in run_threads(1, written, "dp1 ddp")[0]}
    every = [box for own in run_threads(int(plan[2]), written, plan) for box in own]
    found: dict[str, list[Tensor]] = {}
    for name, _, x in sorted(every, key=lambda box: box[:2]):
        found.setdefault(name, []).append(x.flatten())
    assert found.keys() == expected.keys()
    assert any("exp_avg/last.scale" in name for name in found)
    for name, parts in found.items():
        assert difference(torch.cat(parts), expected[name].flatten()) <= 1e-9, name


def refused(world: World, kind: Any, after: bool) -> str:
    model = settled(nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)))
    optim = None if after else kind(model.parameters())
    model = sw.FSDP(model, world=world)
    optim = kind(model.parameters()) if after else optim
    model(rows(0, world.rank).float()).sum().backward()
    assert optim is not None
    with pytest.raises(InputError) as error:
        optim.step(lambda: 0.0)
    return str(error.value)


class Own(torch.optim.Muon):
    """A class of the user's that keeps what makes Muon need whole matrices."""


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS, Own])
def test_an_optimizer_that_needs_whole_tensors_is_refused_over_pieces(kind: Any, after: bool):
    """A piece of a matrix has two dimensions: Muon would take it, and compute something else."""
    for text in run_threads(2, refused, kind, after):
        assert f"a step of {kind.__name__}, which needs whole tensors" in text


def test_such_an_optimizer_works_where_parameters_are_whole():
    """Under sw.DDP, and in plain PyTorch beside Shardwise."""
    model = sw.DDP(nn.Linear(6, 8, bias=False), sw.init())
    for optim in (torch.optim.Muon(model.parameters()), torch.optim.Adafactor([torch.zeros(2, 2)])):
        optim.step()
