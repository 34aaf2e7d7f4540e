"""Models and layers that do not fit their plans of layers: each is refused, with a remedy."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.errors import InputError
from shardwise.models import gpt
from tests.engine.cases import small_gpt, text, tied_gpt
from tests.verify import micro


class Odd(nn.Module):
    """A layer that is called by a method, gives a number with a gradient, or is beside a weight."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a = how, micro.Block(1.0)
        self.tensor_table = sw.Table.of({"a.up": "colwise", "a.down": "rowwise"})
        if how == "weight":
            self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "part":
            return self.a.down(self.a.up(x))
        return self.a(x) * (self.scale if self.how == "weight" else 1.0)


@pytest.mark.parametrize(
    ("how", "said"),
    [("part", "without a call of a"), ("weight", "which has parameters of its own")],
)
def test_layers_that_hooks_do_not_see(how: str, said: str):
    """A part of a layer that is called alone, and a layer in the unit of another plan."""
    batch = micro.vectors(4, 0)
    with pytest.raises(InputError, match=said):
        sw.predict(Odd(how).double(), "dp2 | a: tp2", batch, loss=micro.error)


class Flattening(nn.Module):
    """An embedding of all words of a batch, in one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.tensor_table = sw.Table.of({"embed": "vocabulary"})

    def forward(self, words: Tensor) -> Tensor:
        return self.embed(words.flatten()).view(*words.shape, 6).sum(1)


def test_inputs_whose_rows_are_flattened():
    """They are refused: no dim counts the rows that the layer's ranks share."""
    batch = torch.randint(7, (4, 5)), torch.randn(4, 6)
    with pytest.raises(InputError, match="no dim 0 counts the rows"):
        sw.predict(Flattening(), "dp2 | embed: tp2", batch, loss=micro.error)


@pytest.mark.parametrize(
    ("plan", "make", "said"),
    [
        ("dp2 | emb: zero1", small_gpt, "Write instead: 'embed: zero1'"),
        ("dp2 | blocks.0-99: zero1", small_gpt, "which match no module of the GPT"),
        ("dp4 | blocks.1-9: tp2", small_gpt, "the layers blocks.1-9 in the plan"),
        ("dp4 | blocks.1-9: tp2", small_gpt, "some of which match no module"),
        ("dp4 | blocks.0-9: tp2", small_gpt, "Write instead: 'blocks.0-1: tp2'"),
        ("dp4 | blocks.7-9: tp2", small_gpt, "tp2', which match no module"),
        ("dp4 | embed,blocks.1-9: tp2", small_gpt, "Write instead: 'embed,blocks.1: tp2'"),
        ("dp2 | blocks: tp2 | blocks.0: zero1", small_gpt, "all have an earlier plan"),
        ("dp2 | blocks.0.mlp: tp2 | blocks.0: zero1", small_gpt, "is inside of the other"),
        ("dp2 | head: tp2", tied_gpt, "'embed,head: tp2'"),
        ("dp2 recompute:full | blocks.0.mlp: tp2", small_gpt, "contains the layer blocks.0.mlp"),
        ("dp4 | blocks.0: tp4", small_gpt, "heads"),
    ],
)
def test_models_that_do_not_fit(plan: str, make: Any, said: str):
    """The error names the layer and the line to write; `predict` says the same."""
    with pytest.raises(InputError) as error:
        sw.predict(make(), plan, text(0, 8), loss=gpt.loss)
    assert said in str(error.value)


class Biased(nn.Module):
    """A layer that takes a tensor with a gradient and without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.block = nn.Linear(3, 6, bias=False), Shifted()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.shift(torch.ones(3, 3, dtype=x.dtype)))


class Shifted(nn.Module):
    """A linear layer of an input and a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.tensor_table = sw.Table.of({"linear": "colwise_gather_output"})

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.linear(x + shift.sum(0))


def test_an_input_with_a_gradient_and_without_rows():
    """It is refused: its gradient would be that of the rows of several ranks."""
    batch = micro.vectors(4, 0)
    with pytest.raises(InputError, match="does not count the rows of the batch"):
        sw.predict(Biased().double(), "dp2 | block: tp2", batch, loss=micro.error)
