"""What `verify` is given: tables on its command line, models of a program, a bound on memory."""

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.core.errors import InputError
from shardwise.core.layouts.tensor_table import Table
from shardwise.core.plan.plan import Plan
from shardwise.engine.predict import predict_with
from shardwise.models.registry import find
from shardwise.models.trainable import Loss, Trainable
from shardwise.verify.command import cause, model_of, verify
from shardwise.verify.finding import Costs, Finding
from shardwise.verify.inputs import Options, table_in
from shardwise.verify.parity import build_options
from tests.train.runs import ended
from tests.verify import small

STYLES = {"0": "colwise", "2": "rowwise"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("table.toml", '"0" = "colwise"\n"2" = "rowwise"\n'),
        ("table.json", '{"0": "colwise", "2": "rowwise"}'),
        (
            "all.toml",
            'heads = 4\n[styles]\n"0" = "colwise"\n"2" = "rowwise"\n[sequence]\n"*n" = "sequence"',
        ),
    ],
)
def test_a_table_is_read_from_a_file(name: str, text: str, tmp_path: Path):
    """TOML and JSON, styles alone or with what Table.of takes beside them."""
    (tmp_path / name).write_text(text)
    more = {"heads": 4, "sequence": {"*n": "sequence"}} if name == "all.toml" else {}
    assert table_in(tmp_path / name) == Table.of(STYLES, **more)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('blocks.up = "colwise"', "the name blocks that holds other names"),
        ('"0" = "colwize"', '"colwise"'),
        ("", "which has no styles"),
        ("0 colwise", "--table .*table.toml"),
        ('depth = 2\n[styles]\n"0" = "colwise"', "depth beside styles"),
    ],
)
def test_a_file_that_has_no_table_is_refused(text: str, said: str, tmp_path: Path):
    """With the name of the file, and the line to write instead."""
    (tmp_path / "table.toml").write_text(text)
    with pytest.raises(InputError, match=said) as error:
        table_in(tmp_path / "table.toml")
    assert "table.toml" in str(error.value)


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
def test_a_model_of_a_program_is_proved_or_not(loss: Loss, holds: bool):
    """The report says so, and is a text, an object and rows; a loss that is no mean fails."""
    report = sw.verify(loaded, "dp2 zero3", batch=ROWS, loss=loss, steps=1)
    assert report.holds == holds == all(row.holds for row in report.rows)
    assert report.model == "loaded"
    said = str(report)
    assert said.splitlines()[0].strip() == "dp2 zero3 fp64 on loaded"
    assert ("It holds." in said) == holds
    assert json.loads(report.json())["holds"] == holds
    assert {row.part for row in report.rows} == {"parity", "sent", "held", "held in a step"}
    assert ("The loss is a sum over the rows" in said) != holds
    assert all(row.name in said for row in report.rows if len(row.name) < 20)


class Noisy(nn.Linear):
    """A layer that drops inputs by a call of a function."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.dropout(x, 0.1))


class Counting(nn.Module):
    """A mean of all rows so far, which each rank makes of its own ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.seen = linear(), nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        self.seen.lerp_(y.detach().mean(0).to(self.seen), 0.5)
        return y - self.seen


def centred(model: nn.Module, batch: Tensor) -> Tensor:
    y = model(batch)
    return (y - y.mean(0)).square().mean()


@pytest.mark.parametrize(
    ("build", "loss", "said"),
    [
        (linear, mean, ""),
        (linear, summed, "The loss is a sum over the rows"),
        (linear, centred, "The loss is no mean over the rows"),
        (lambda: nn.Sequential(linear(), Noisy(3, 3)), mean, r"random numbers \(dropout\)"),
        (Counting, mean, "changes the buffer seen, and"),
    ],
)
def test_why_no_plan_can_hold_is_named(build: Callable[[], nn.Module], loss: Loss, said: str):
    """Each is tried in one process; what all ranks compute alike is no cause."""
    model = model_of(build, ROWS, loss, None)
    assert isinstance(model, Trainable)
    found = cause(model, [])
    assert re.search(said, found) and bool(found) == bool(said)


def test_a_loss_that_depends_on_the_rank_is_named():
    """One process has the same batch on every rank."""
    model = model_of(linear, ROWS, mean, None)
    assert isinstance(model, Trainable)
    alone = [Finding(rank, (), Costs(), {}, {}, alone=(1.0 + rank / 100,)) for rank in range(2)]
    assert "is 1 on rank 0, and on another rank 1.01" in cause(model, alone)


def test_rows_of_an_example_batch_are_drawn_alike_often():
    """Any number of them, by the seed; a tensor without rows is the same in every batch."""
    model = model_of(linear, {"x": ROWS, "scale": torch.tensor(2.0)}, mean, None)
    assert isinstance(model, Trainable)
    made, again = model.batch(12, 1), model.batch(12, 1)
    assert made["scale"] == 2.0
    assert torch.equal(made["x"], again["x"])
    assert not torch.equal(made["x"], model.batch(12, 2)["x"])
    assert sorted(made["x"][:, 0].tolist()) == sorted([*ROWS[:, 0].tolist()] * 2)


def test_what_is_given_replaces_what_the_model_has():
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


def number(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum().item()


CALLS = itertools.count(1)


def single(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss that rounds the batch to single precision."""
    return model(batch.float()).mean()


@pytest.mark.parametrize(
    ("build", "batch", "loss", "said"),
    [
        (nn.Linear(2, 3), ROWS, mean, "a Linear .* as the model of sw.verify.*def build"),
        (3, ROWS, mean, "a int .3. as the model of sw.verify"),
        (lambda: linear().requires_grad_(False), ROWS, mean, "all frozen"),
        (linear, {"x": ROWS, "y": ROWS[:4]}, mean, "rows"),
        (linear, ROWS[:0], mean, "tensors have no rows"),
        (linear, 5, mean, "batch=, an example batch"),
        (linear, lambda _: ROWS, mean, "TypeError.*make_batch.rows, seed."),
        (linear, lambda *_: ROWS[:1], mean, "returns 1 rows.*make_batch.rows, seed."),
        (linear, lambda rows, _: torch.ones(rows // 0), mean, "ZeroDivisionError.*test_options.py"),
        (linear, lambda rows, _: torch.rand(rows, 2), mean, "which ignores its seed"),
        (linear, lambda *_: [ROWS[:2]] * next(CALLS), mean, "which ignores its seed"),
        (linear, lambda rows, _: torch.ones(rows, 2).to_sparse(), mean, "no tensor of rows"),
        (linear, lambda rows, _: torch.ones(rows, 2) / 0 * 0, mean, "the loss is not finite"),
        (linear, lambda *_: sys.exit(3), mean, "SystemExit: 3 .test_options.py"),
        (linear, ROWS, single, "step in fp64 .* must have the same dtype"),
        (linear, ROWS, lambda m, x: m(x).sum(1), r"a loss that returns a tensor of shape \(2,\)"),
        (linear, ROWS, number, "a loss that returns a float"),
        (gpt, ROWS, mean, 'the model "gpt", whose step in fp64 on one process gives'),
    ],
)
def test_what_is_no_model_or_batch_is_refused_in_a_paragraph(
    build: Any, batch: object, loss: Loss, said: str
):
    """Before any rank starts, with what to write instead, or with its own error and line."""
    with pytest.raises(InputError, match=said) as error:
        sw.verify(build, "dp2", batch=batch, loss=loss)
    assert len(str(error.value).splitlines()) == 1


def test_an_error_of_a_file_is_answered_with_its_line():
    """Before any rank starts."""
    said = r"shapes cannot be multiplied \(2x7 and 6x6\) \(small\.py, line \d+\)"
    with pytest.raises(InputError, match=said):
        verify("dp2", f"{small.__file__}:narrow")


@pytest.mark.full
def test_what_only_a_rank_finds_is_answered_once(capsys: pytest.CaptureFixture[str]):
    """Each rank refuses the model: the command says it once, without traceback, and ends with 2."""
    code, _, said = ended(capsys, "verify", "pp2", "--model", f"{small.__file__}:asks")
    assert code == 2
    assert re.match(r"Given: item of a tensor that comes from sum after .*, in small\.py:\d+", said)
    assert said.count("Write instead:") == 1
    assert said.count("\n") == 1


@pytest.mark.full
def test_a_bound_that_a_step_exceeds_is_one_paragraph_with_one_that_can_be_met():
    """Before ranks start, by prediction."""
    model, plan = find("gpt"), Plan.parse("dp1 fp32")
    options = build_options(model, plan, Options())
    peak_bytes = predict_with(model.plain(), plan, model.batch(2, 0), options).device_peak
    with pytest.raises(InputError, match="a bound above that") as caught:
        verify(f"{plan} device_memory:{peak_bytes // 100}B", steps=1)
    (found,) = re.findall(r"Write instead: '(dp1 fp32 device_memory:\d+MiB)'", str(caught.value))
    assert verify(found, steps=1).holds
