"""Where stages begin: by weight, by hand, by a plan's count of blocks, by measured time."""

import re
import threading
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World, traced
from shardwise.core.errors import InputError
from shardwise.models import gpt
from shardwise.models.registry import find
from shardwise.techniques.pipeline.partition import balance_by_time, misplaced, starts
from tests.pool import run_threads


def small(layers: int = 6, tied: bool = False, vocabulary: int = 8) -> gpt.GPT:
    return gpt.GPT(gpt.GPTConfig(vocabulary, layers, 8, 2, 2, 8, 8, tied))


def linears(width: int, count: int) -> list[nn.Linear]:
    return [nn.Linear(width, width) for _ in range(count)]


def of(**parts: nn.Module) -> nn.Module:
    """A module of these parts."""
    model = nn.Module()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


class Config:
    model_type = "other"
    base_model_pp_plan: ClassVar = {"embed": (), "blocks": (), "norm": ()}


class Planned(nn.Module):
    """`base_model_pp_plan` says which list is gone through, and the heavy one is not."""

    base_model_prefix = "base"
    config = Config()

    def __init__(self) -> None:
        super().__init__()
        lists = {"heavy": nn.ModuleList(linears(40, 3)), "blocks": nn.ModuleList(linears(4, 3))}
        self.base = of(norm=nn.Linear(4, 4), embed=nn.Linear(4, 4), **lists)


#: What is cut, in how many stages, and where.
CUT: dict[str, tuple[Callable[[], nn.Module], int, tuple[str, ...]]] = {
    "blocks of equal weight": (small, 3, ("blocks.2", "blocks.4")),
    "heavy ends": (lambda: small(vocabulary=200), 3, ("blocks.1", "blocks.5")),
    "a tied head weighs twice": (lambda: small(6, True, 200), 3, ("blocks.1", "blocks.5")),
    "one stage": (small, 1, ()),
    "more stages than blocks": (
        lambda: small(2, vocabulary=112),
        4,
        ("blocks.0", "blocks.1", "head"),
    ),
    "a sequential": (
        lambda: nn.Sequential(*[m for n in linears(4, 2) for m in (n, nn.ReLU())], nn.Linear(4, 4)),
        3,
        ("2", "4"),
    ),
    "lists in a list, which are not called": (
        lambda: of(blocks=nn.ModuleList(nn.ModuleList(linears(4, 2)) for _ in range(2))),
        4,
        ("blocks.0.1", "blocks.1.0", "blocks.1.1"),
    ),
    "a small list goes with its neighbour": (
        lambda: of(blocks=nn.ModuleList(linears(30, 2)), head=nn.Sequential(*linears(4, 2))),
        2,
        ("blocks.1",),
    ),
    "a plan of transformers": (Planned, 3, ("base.blocks.1", "base.blocks.2")),
    "llama": (lambda: find("hf:llama").build(), 2, ("model.layers.1",)),
    "gpt2": (lambda: find("hf:gpt2").build(), 2, ("transformer.h.1",)),
    "bert": (lambda: find("hf:bert").build(), 2, ("bert.encoder.layer.1",)),
    "an encoder and a decoder": (
        lambda: find("hf:bart").build(),
        4,
        ("model.encoder.layers.1", "model.decoder.layers.0", "model.decoder.layers.1"),
    ),
}


@pytest.mark.cases(20)
@pytest.mark.parametrize("what", CUT)
def test_where_stages_begin(what: str):
    """Between what repeats, so that stages weigh as equally as they can."""
    pytest.importorskip("transformers")
    make, stages, wanted = CUT[what]
    assert starts(make(), stages) == wanted


def test_stages_by_hand_are_those_given():
    """Any module that is called may begin a stage; more stages than layers are refused."""
    assert starts(small(), 3, ["blocks.1", "head"]) == ("blocks.1", "head")
    text = r"6 stages for a GPT of 5 layers.*embed, blocks\.0, blocks\.1, norm, head.*pp5"
    with pytest.raises(InputError, match=text):
        starts(small(layers=2), 6)


@pytest.mark.parametrize("counts", [(1, 3, 2), (4, 1, 1)])
def test_a_plan_counts_the_blocks_of_stages(counts: tuple[int, ...]):
    """Each rank holds the next so many, and no other."""
    plan, first = f"pp3 1f1b:3 stages:{','.join(map(str, counts))}", 0
    for rank, count in enumerate(counts):
        names = [box.name for box in sw.parallelize(small(), plan, traced(rank, 3)).boxes()]
        held = {int(found[1]) for name in names if (found := re.search(r"blocks\.(\d+)", name))}
        assert held == {*range(first, first + count)}
        assert any("embed" in name for name in names) == (rank == 0)
        assert any("head" in name for name in names) == (rank == 2)
        first += count


def test_what_transformers_defines_out_of_order_is_known():
    """A norm after the blocks that it stands before, a head before the blocks it stands on."""
    pytest.importorskip("transformers")
    other = "model.encoder.embed_positions"
    assert misplaced(find("hf:bart").build())["model.encoder.layernorm_embedding"] == other
    assert misplaced(find("hf:camembert").build()) == {"lm_head": "roberta"}
    assert misplaced(Planned()) == {"base.norm": "base.blocks"}
    assert misplaced(small()) == misplaced(find("hf:llama").build()) == {}


class Clock(threading.local):
    """A clock that only layers move: one for each thread, that is each rank."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow(nn.Module):
    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds, self.weight = clock, seconds, nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds
        return x + self.weight


def timed(world: World, clock: Clock) -> tuple[str, ...]:
    """The cut by a clock that goes differently on every rank."""
    model = nn.Sequential(*[Slow(clock, s) for s in [(1, 1, 9, 1), (9, 1, 1, 1)][world.rank]])
    assert starts(model, 3) == ("1", "2")
    found = balance_by_time(model, lambda m: m(torch.zeros(1)), 3, world=world)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model)
    return found


def test_stages_by_time_balance_what_layers_take(monkeypatch: pytest.MonkeyPatch):
    """One slow layer of four is a stage of its own; the first rank's times decide for all."""
    clock = Clock()
    monkeypatch.setattr("shardwise.techniques.pipeline.partition.time", clock)
    assert run_threads(2, timed, clock) == [("2", "3")] * 2


def test_a_model_without_memory_cannot_be_timed():
    """The error names what can be done instead."""
    with torch.device("meta"):
        model = small()
    with pytest.raises(InputError, match=r"on the meta device.*starts\(model, stages\)"):
        balance_by_time(model, lambda m: m(torch.zeros(1, 2).long()), 2)
