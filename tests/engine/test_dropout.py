"""Dropout inside blocks of every table: three steps on the tensor axis are one process's.

Ranks are processes: threads would share torch's default generator.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.comm.world import World
from tests.engine.cases import Case, Run, Task, ranks_of, regression, share
from tests.engine.tensors import ADAMW, Held, assert_counted, assert_parity, train, whole_run
from tests.parallel.layers import APART, COUNTS, HIDDEN, PAIR, TOGETHER, WIDTH, Kind, Mlp, sequences
from tests.pool import run_gloo

ROWS = 4  # a multiple of the heads of a rank, so that a row could be taken for some


class Gated(nn.Module):
    """Gate and up in one weight; the gate is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.3)
        self.both, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(self.norm(x)).chunk(2, -1)
        return x + self.down(functional.silu(self.drop(gate)) * up)


class Attention(nn.Module):
    """Heads of width 2, q, k and v apart or packed; `rates` of dropout on each of the three.

    "features" on [B, T, D], "head" on [B, h, T, 2], "result" on what they make, [B, T, D].
    """

    def __init__(self, heads: int, kv_heads: int, packed: bool, rates: Mapping[str, float]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.packed = heads, kv_heads, packed
        self.norm = nn.LayerNorm(WIDTH)
        sizes = [2 * heads, 2 * kv_heads, 2 * kv_heads]
        if packed:
            self.qkv = nn.Linear(WIDTH, sum(sizes))
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, size) for size in sizes)
        self.out = nn.Linear(2 * heads, WIDTH)
        places = ("features", "head", "result")
        self.drop = nn.ModuleDict({place: nn.Dropout(rates.get(place, 0.0)) for place in places})

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        sizes = [2 * self.heads, 2 * self.kv_heads, 2 * self.kv_heads]
        made = self.qkv(y).split(sizes, -1) if self.packed else (self.q(y), self.k(y), self.v(y))
        by_head = (self.drop["features"](z).unflatten(-1, (-1, 2)).transpose(1, 2) for z in made)
        q, k, v = map(self.drop["head"], by_head)
        mixed = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x + self.out(self.drop["result"](mixed.transpose(1, 2).flatten(2)))


class Shifting(nn.Module):
    """Dropout of a block's input, of the whole sequence, and of what is split again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Dropout(0.2), nn.Dropout(0.3)
        self.norm, self.before, self.after = nn.LayerNorm(WIDTH), nn.Identity(), nn.Identity()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        whole = self.drop(self.before(self.norm(x)))
        y = self.drop(self.after(whole + whole.roll(1, 1)))
        return x + self.down(functional.gelu(self.up(y)))


def hooked() -> nn.Module:
    """A block whose layers' outputs are dropped by hooks of the user's."""
    block = Mlp()
    for layer in (block.up, block.down):
        layer.register_forward_hook(drop)
    return block


def drop(_: nn.Module, __: Any, y: Tensor) -> Tensor:
    return functional.dropout(y, 0.3)


def attention(heads: int, kv_heads: int, packed: bool, **rates: float) -> Kind:
    """Attention that drops."""
    styles = {n: s for n, s in (TOGETHER if packed else APART).items() if s != "replicated"}
    make = partial(Attention, heads, kv_heads, packed, rates)
    return Kind(make, styles, heads=heads, kv_heads=kv_heads, sets=COUNTS)


JOINED = {"norm": "sequence", "before": "sequence:join", "after": "split"}
KINDS: dict[str, Kind] = {
    "gate": Kind(Gated, {"both": "colwise:2", "down": "rowwise"}),
    "features": attention(4, 2, False, features=0.3, result=0.2),
    "features of packed": attention(6, 2, True, features=0.3, result=0.2),
    "heads": attention(4, 2, False, head=0.3),
    "heads of packed": attention(6, 2, True, head=0.3),
    "joined": Kind(Shifting, PAIR, JOINED),
    "hooked": Kind(hooked, PAIR),
}


def task(name: str) -> Task:
    """The training of a kind of block."""
    return Task(KINDS[name].model, partial(sequences, rows=ROWS), regression, None)


def drawing(world: World, work: Task, case: Case) -> tuple[Held, Tensor]:
    """What a rank saw of the training, and the generator after it."""
    torch.manual_seed(world.rank)  # the first rank's of a tensor axis is that axis's from here on
    return train(world, work, case), torch.get_rng_state()


def one_process(work: Task, case: Case) -> tuple[Run, Tensor]:
    """The same of one process that begins as the first rank does."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return whole_run(work, case), torch.get_rng_state()


def begun(work: Task, rank: int) -> Tensor:
    """The generator with which that rank begins, having made its model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rank)
        work.make()
        return torch.get_rng_state()


CASES = [(plan, name) for plan in ("tp2", "tp2 sp", "tp4 sp") for name in KINDS]


@pytest.mark.parametrize(("plan", "name"), CASES)
def test_parity(plan: str, name: str):
    """Packed columns, heads that ranks share, split and joined sequences: all drop as one does."""
    case = Case(f"{plan} fp64", **ADAMW)
    found = run_gloo(ranks_of(plan), drawing, task(name), case)
    expected, after = one_process(task(name), case)
    assert_parity([held for held, _ in found], expected, 1e-10)
    assert_counted([held for held, _ in found])
    assert all(torch.equal(state, after) for _, state in found)


@pytest.mark.parametrize("plan", ["dp2 tp2", "dp2 tp2 sp zero3"])
def test_each_data_rank_draws_for_its_rows(plan: str):
    """Ranks of one tensor axis draw as one process would for their rows; another axis otherwise."""
    case, work = Case(f"{plan} fp64", **ADAMW), task("features")
    found = run_gloo(ranks_of(plan), drawing, work, case)
    states = [begun(work, first) for first in (0, 2)]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        means: list[Tensor] = []
        for data_rank in range(2):
            torch.set_rng_state(states[data_rank])
            means.append(work.loss(model, share(batch, data_rank, 2)))
            states[data_rank] = torch.get_rng_state()
        return torch.stack(means).mean()

    expected, _ = one_process(replace(work, loss=loss), case)
    assert_parity([held for held, _ in found], expected, 1e-10)
    assert [torch.equal(state, states[0]) for _, state in found] == [True, True, False, False]
    assert [torch.equal(state, states[1]) for _, state in found] == [False, False, True, True]
