"""`sw.verify`: the proof of a model of a program; docs/tutorials/your-model.md has one."""

import json

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.errors import InputError
from shardwise.models.trainable import Loss, Trainable
from shardwise.verify.own import model_of

ROWS = torch.arange(12.0).reshape(6, 2)


def linear() -> nn.Module:
    return nn.Linear(2, 3)


def gpt() -> nn.Module:
    """A function with the name of a model of the command line, for other rows."""
    return nn.Linear(5, 3)


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def summed(model: nn.Module, batch: Tensor) -> Tensor:
    """Of all rows, where a mean is asked for: each rank divides by its own number."""
    return model(batch).square().sum()


def loaded() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh(), nn.Linear(3, 1))


def of_rows(count: int, seed: int) -> Tensor:
    return torch.full((count, 2), float(seed))


@pytest.mark.parametrize(("loss", "holds"), [(mean, True), (summed, False)])
def test_a_model_of_a_program_is_proved_or_not(loss: Loss, holds: bool) -> None:
    """The report says so, and is a text, an object and rows; a loss that is no mean fails."""
    report = sw.verify(loaded, "dp2 zero3", batch=ROWS, loss=loss, steps=1)
    assert report.holds == holds == all(row.holds for row in report.rows)
    assert report.model == "loaded"
    said = str(report)
    assert said.splitlines()[0].strip() == "dp2 zero3 fp64 on loaded"
    assert ("It holds." in said) == holds
    assert json.loads(report.json())["holds"] == holds
    assert {row.part for row in report.rows} == {"parity", "sent", "held"}
    assert all(row.name in said for row in report.rows if len(row.name) < 20)


def test_rows_of_an_example_batch_are_drawn_alike_often() -> None:
    """Any number of them, by the seed; a tensor without rows is the same in every batch."""
    model = model_of(linear, {"x": ROWS, "scale": torch.tensor(2.0)}, mean, None)
    assert isinstance(model, Trainable)
    made, again = model.batch(12, 1), model.batch(12, 1)
    assert made["scale"] == 2.0
    assert torch.equal(made["x"], again["x"])
    assert not torch.equal(made["x"], model.batch(12, 2)["x"])
    assert sorted(made["x"][:, 0].tolist()) == sorted([*ROWS[:, 0].tolist()] * 2)


def test_what_is_given_replaces_what_the_model_has() -> None:
    """Batches, the loss and the tokens, of a function that has its own and of a named model."""

    def build() -> tuple[nn.Module, object, object]:
        return linear(), summed, of_rows

    for given in (build, "gpt"):
        model = model_of(given, of_rows, mean, len)
        assert isinstance(model, Trainable)
        assert model.loss is mean
        assert model.tokens is len
        assert model.batch(3, 7).tolist() == [[7.0, 7.0]] * 3
    own = model_of(build, None, None, None)
    assert isinstance(own, Trainable)
    assert own.loss is summed
    assert model_of("gpt", None, None, None) == "gpt"


@pytest.mark.parametrize(
    ("build", "batch", "said"),
    [
        (nn.Linear(2, 3), ROWS, "a Linear .* as the model of sw.verify.*def build"),
        (3, ROWS, "a int .3. as the model of sw.verify"),
        (linear, {"x": ROWS, "y": ROWS[:4]}, "rows"),
        (linear, ROWS[:0], "tensors have no rows"),
        (linear, 5, "a batch without a tensor"),
        (gpt, ROWS, 'the model "gpt", whose step in fp64 on one process gives'),
    ],
)
def test_what_is_no_model_or_batch_is_refused_in_a_paragraph(
    build: object, batch: object, said: str
) -> None:
    """Before any rank starts, with what to write instead."""
    with pytest.raises(InputError, match=said) as error:
        sw.verify(build, "dp2", batch=batch, loss=mean)  # pyright: ignore[reportArgumentType]
    assert len(str(error.value).splitlines()) == 1
