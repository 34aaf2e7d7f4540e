"""Models and layers that do not fit their plans of layers: each is refused, with a remedy."""

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.errors import InputError
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
