"""Outputs of units in any container, changed in place or lazy: their backward is one process's."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World
from shardwise.techniques.data.apply import driver_of
from shardwise.techniques.data.outputs import Output
from tests.engine.cases import difference, settled, squares
from tests.engine.loops import rows
from tests.pool import run_threads


class Slots:
    """No __dict__, and a private name."""

    __slots__ = ("__value",)

    def __init__(self, value: Any) -> None:
        self.__value = value

    @property
    def hidden(self) -> Any:
        return self.__value


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Tensor


class ModelOutput(OrderedDict[str, Any]):
    """A dict that also has its items as attributes, as that of transformers."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__(hidden=hidden)
        self.hidden = hidden


class Cache:
    """Objects in a list in an object."""

    def __init__(self, hidden: Tensor) -> None:
        self.layers = [{"first": Slots(hidden)}]

    @property
    def hidden(self) -> Tensor:
        return self.layers[0]["first"].hidden


Make = Callable[["Block", Tensor], Any]
Take = Callable[[Any, Tensor], Tensor]


def plain(block: "Block", x: Tensor) -> Tensor:
    return block.down(torch.tanh(block.up(x)))


def attribute(out: Any, x: Tensor) -> Tensor:
    return x + out.hidden


def in_place(out: Tensor, x: Tensor) -> Tensor:
    out += x
    out[:, :2] *= 0.5
    return out


def lazy(block: "Block", x: Tensor) -> Iterator[Tensor]:
    return (plain(block, part) for part in x.chunk(3))


#: What a block returns, and how the model goes on with it.
KINDS: dict[str, tuple[Make, Take]] = {
    "view": (lambda b, x: plain(b, x).unsqueeze(0).squeeze(0), in_place),
    "view of a view": (lambda b, x: plain(b, x).view(-1).view(-1, 6), in_place),
    "slots": (lambda b, x: Slots(plain(b, x)), attribute),
    "frozen": (lambda b, x: Frozen(plain(b, x)), attribute),
    "model output": (lambda b, x: ModelOutput(plain(b, x)), attribute),
    "cache": (lambda b, x: Cache(plain(b, x)), attribute),
    "set": (lambda b, x: {plain(b, x)}, lambda out, x: x + next(iter(out))),
    "generator": (lazy, lambda out, x: x + torch.cat(list(out))),
    "closure": (lambda b, x: lambda: plain(b, x), lambda out, x: x + out()),
    "weight": (lambda b, x: (plain(b, x), b.down.weight[:, :6]), lambda out, _: out[0] @ out[1]),
}
LAZY = ("generator", "closure", "weight")


class Block(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self, x)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        make, self.take = KINDS[kind]
        self.enter = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(make) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = self.take(block(x), x)
        return x


def build(kind: str) -> nn.Module:
    return settled(Model(kind)).double()


def trained(world: World, kind: str) -> tuple[dict[str, Any], dict[str, Any], list[float], bool]:
    """The weights after three steps of a loop and of an engine; what an evaluation found."""
    model = sw.FSDP(build(kind), units=Block, world=world)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[float] = []
    for step in range(3):
        with torch.no_grad():
            seen.append(float(squares(model, rows(step, 0))))
        squares(model, rows(step, world.rank)).backward()
        optim.step()
        optim.zero_grad()
    plan, how = "zero3 fp64", {"units": Block, "least_unit_bytes": 0}
    engine = sw.parallelize(build(kind), plan, world, optimizer=sw.SGD(lr=0.1), loss=squares, **how)
    for step in range(3):
        engine.step(rows(step, engine.data_rank))
        engine.evaluate(rows(step, 0))
    data = driver_of(model)
    assert data is not None
    return (
        sw.full_state_dict(model),
        sw.full_state_dict(engine),
        seen,
        any(unit.state.unwatched for unit in data.units.order),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_units_give_their_outputs_in_any_form(kind):
    """Under zero3 and FSDP. Only units whose outputs cannot be seen stay gathered."""
    model = build(kind)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    evaluated: list[float] = []
    for step in range(3):
        evaluated.append(float(squares(model, rows(step, 0)).detach()))
        for rank in range(2):
            (squares(model, rows(step, rank)) / 2).backward()
        optim.step()
        optim.zero_grad()
    by_hand, by_engine, seen, unwatched = run_threads(2, trained, kind)[0]
    assert unwatched == (kind in LAZY)
    assert seen == pytest.approx(evaluated, rel=1e-10)
    for name, value in model.state_dict().items():
        assert difference(by_hand[name], value) <= 1e-10, name
        assert difference(by_engine[name], value) <= 1e-10, name


def test_what_is_plain_is_not_opaque():
    """Numbers, texts, dtypes and functions without a closure hold no tensor."""
    x = torch.ones(1)
    seen = Output([x, None, 1, "a", torch.float32, torch.Size([1]), torch.tanh, plain, Slots(2)])
    assert (seen.tensors, seen.opaque) == ([x], False)
    assert Output({"rest": iter([x])}).opaque
    assert Output(nn.Linear(1, 1)).opaque
