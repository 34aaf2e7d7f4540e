"""Sequences of several lengths in one model under `sp`: pairs, encoder and decoder."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.models.initial import fill
from tests.engine.cases import Case, Task
from tests.engine.tensors import ADAMW, equals_one, holds
from tests.pool import run_threads

WORDS, WIDTH, HEADS = 11, 8, 2


class Attention(nn.Module):
    """Of x [B, T, D] to itself, or to `memory` [B, S, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        pairs = ((self.q, x), (self.k, memory), (self.v, memory))
        q, k, v = (
            layer(of).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2) for layer, of in pairs
        )
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention of a normalised stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if memory is None:
            return x + self.attn(self.norm(x))
        return x + self.attn(self.norm(x), memory=memory)


class Translator(nn.Module):
    """Two sequences side by side; with `cross`, the second reads the first."""

    def __init__(self, cross: bool, again: bool = False) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(WORDS, WIDTH), Block(), Block()
        self.join, self.cross = (nn.LayerNorm(WIDTH), Block()) if cross else (None, None)
        self.last, self.head, self.again = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS), again
        fill(self.double(), seed=3)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.embed(a), self.embed(b)
        x, y = self._run(self.first, x), self._run(self.first, y)
        x, y = self._run(self.second, x), self._run(self.second, y)
        if self.cross is not None and self.join is not None:
            y = self.cross(y, self.join(x))
        return self.head(self.last(x)), self.head(self.last(y))

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False) if self.again else block(x)

    @property
    def tensor_table(self) -> sw.Table:
        styles = {"embed": "vocabulary", "*.attn.[qkv]": "colwise:heads"}
        styles |= {"*.attn.out": "rowwise:heads", "head": "vocabulary"}
        sequence = {"embed": "vocabulary:sequence", "*.norm": "sequence", "last": "sequence"}
        sequence |= {"join?": "sequence:join", "*.attn": "gather"}
        return sw.Table.of(styles, heads=HEADS, sequence=sequence)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of both sequences, each word from itself."""
    made = model(*batch)
    return sum(
        (
            functional.cross_entropy(x.flatten(0, 1), y.flatten())
            for x, y in zip(made, batch, strict=True)
        ),
        start=torch.zeros(()),
    )


def pair(lengths: tuple[int, int], turn: bool, step: int) -> tuple[Tensor, Tensor]:
    """Two sequences a row, of these lengths; in every other step the other way round."""
    own = torch.Generator().manual_seed(step)
    turned = lengths[::-1] if turn and step % 2 else lengths
    a, b = (torch.randint(WORDS, (4, length), generator=own) for length in turned)
    return a, b


def work(cross: bool, lengths: tuple[int, int], again: bool = False, turn: bool = False) -> Task:
    """The task of a pair of these lengths."""
    return Task(partial(Translator, cross, again), partial(pair, lengths, turn), loss, None)


@pytest.mark.crossed
@pytest.mark.parametrize("lengths", [(8, 7), (7, 8), (9, 5), (4, 4), (1, 3)])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("plan", ["tp2 sp", "dp2 tp2 sp zero2 accumulate:2"])
def test_two_sequences_in_one_forward(plan: str, cross: bool, lengths: tuple[int, int]):
    """Also where both would be padded alike, and where one is whole for the other to read."""
    case, task = Case(f"{plan} fp64", clip=0.5, **ADAMW), work(cross, lengths)
    holds(run_threads, task, case)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["tp2 sp", "pp2 tp2 sp 1f1b:2"])
@pytest.mark.parametrize("again", [False, True])
def test_lengths_that_change_from_step_to_step(plan: str, again: bool):
    """What is computed again, and what another stage has split, has the length it had."""
    task = work(cross=True, lengths=(8, 7), again=again, turn=True)
    case = Case(f"{plan} fp64", clip=0.5, steps=4, **ADAMW)
    equals_one(run_threads, task, case)
