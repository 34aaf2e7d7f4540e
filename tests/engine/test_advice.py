"""What the checker advises for a split sequence is followed as it stands, and computes the same."""

import ast
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from tests.engine.cases import settled
from tests.pool import run_threads

STYLES = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    """A feed-forward layer, after a convolution over positions where there is one."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.before, self.after = nn.Identity(), nn.Identity()
        self.conv = nn.Conv1d(8, 8, 3, padding=1) if mixes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after(self.conv(self.before(x).transpose(1, 2)).transpose(1, 2))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Positions are embedded before the blocks, and the head gives logits of whole sequences."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.blocks = nn.Sequential(Block(mixes), Block(mixes))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def losses(world: World, plan: str, mixes: bool, table: Any) -> list[float]:
    """Of three steps on the same tokens."""
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(0))
    engine = sw.parallelize(
        settled(Model(mixes)), plan, world, sw.SGD(lr=0.1), loss, clip=1.0, table=table
    )
    return [engine.step(tokens).loss for _ in range(3)]


def advice(mixes: bool) -> str:
    """What is answered to a table without entries for the sequence."""
    with pytest.raises(InputError) as error:
        sw.parallelize(Model(mixes), "tp2 sp", fake(), table=sw.Table.of(STYLES))
    return str(error.value)


def fake() -> World:
    """A world of two, for what is refused before anything is sent."""
    from shardwise.comm.world import traced

    return traced(0, 2)


@pytest.mark.parametrize("mixes", [False, True])
def test_the_advice_is_followed_in_one_go(mixes: bool):
    """The first answer has all entries; with them `tp2 sp` has the losses of one process."""
    said = advice(mixes)
    entries = ast.literal_eval(re.findall(r"sequence=({'.*?})\)", said)[0])
    assert ("Conv1d" in said) is mixes
    if mixes:  # an nn.Identity before and another after
        assert 'sequence={"blocks.*.conv": "whole"}' in said
        entries |= {"blocks.*.conv": "whole"}
        entries |= {"blocks.*.before": "sequence:join", "blocks.*.after": "split"}
    table = sw.Table.of(STYLES, sequence=entries)
    wanted = losses(alone(), "fp64", mixes, None)
    for found in run_threads(2, losses, "tp2 sp fp64", mixes, table):
        assert found == pytest.approx(wanted, rel=1e-12)


def test_an_error_of_sizes_names_the_entry_that_may_be_missing():
    """Logits of half the positions beside all targets: torch's error, with a note."""
    entries = {"blocks.0": "split", "*norm": "sequence", "head": "sequence"}
    table = sw.Table.of(STYLES, sequence=entries)
    notes = run_threads(2, noted, table)
    assert all("sequence:join for the norm before code that pools" in note for note in notes)


def noted(world: World, table: Any) -> str:
    with pytest.raises(ValueError, match="batch_size") as error:
        losses(world, "tp2 sp", False, table)
    return "".join(error.value.__notes__)
