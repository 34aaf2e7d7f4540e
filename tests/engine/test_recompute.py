"""Recomputation with every other technique: parity, bytes, leaks, dropout."""

import gc
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.core.plan import Plan
from shardwise.engine.model_spec import model_spec
from shardwise.engine.options import EngineOptions
from shardwise.models import gpt
from shardwise.prediction.traffic import part_bytes
from tests.engine.cases import Case, Run, Task, ranks_of, rows_task, small_gpt
from tests.engine.cases import train as trained
from tests.engine.tensors import (
    Held,
    gpt_task,
    train,
)
from tests.engine.test_dropout import gradients
from tests.pool import run_gloo, run_threads

ROWS = ["ddp", "zero1", "zero2", "zero3"]
PLANS = [*(f"dp2 {row}" for row in ROWS), "tp2", "tp2 sp", "pp2 1f1b:3", "pp2 zb-v:4"]


class Dropped(nn.Module):
    """Dropout on the stream, before and after a product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.dropout(self.up(functional.dropout(x, 0.2, self.training)).relu(), 0.4)
        return x + self.down(y)


def dropped() -> nn.Module:
    """Four blocks that draw."""
    torch.manual_seed(7)
    return nn.Sequential(*(Dropped() for _ in range(4)))


def drawn(world: World, plan: str) -> Run:
    """Steps of blocks with dropout, on generators in a state that follows from the rank."""
    task, case = rows_task(dropped), Case(f"{plan} fp64", options={"lr": 0.01, "eps": 1e-4})
    made = task.make()
    torch.manual_seed(world.rank)
    return trained(world, Task(lambda: made, task.batch, task.loss, task.tokens), case)


def same(found: Run, expected: Run) -> None:
    assert found.losses == expected.losses
    assert all(torch.equal(x, expected.weights[name]) for name, x in found.weights.items())


@pytest.mark.parametrize("how", ["full", "selective", "every2", "3KiB"])
def test_dropout_alone(how: str):
    """With dropout the run is equal to the last bit to the run that keeps its activations."""
    same(drawn(alone(), f"recompute:{how}"), drawn(alone(), "ddp"))


@pytest.mark.parametrize("how", ["full", "selective", "3KiB"])
@pytest.mark.parametrize("plan", [*PLANS[:4], "dp2 zero1 accumulate:2"])
def test_dropout_on_processes(plan: str, how: str):
    """The same on real processes, each with random numbers of its own."""
    without = run_gloo(2, drawn, plan)
    found = run_gloo(2, drawn, f"{plan} recompute:{how}")
    for one, other in zip(found, without, strict=True):
        same(one, other)


@pytest.mark.parametrize("words", ["tp2", "tp2 sp"])
@pytest.mark.parametrize("how", ["full", "selective", "partitioned"])
def test_dropout_on_the_tensor_axis(how: str, words: str):
    """Whole and sharded activations are dropped again as they were."""
    kept, again = (
        run_gloo(2, gradients, f"{words}{word}", False) for word in ("", f" recompute:{how}")
    )
    for one, other in zip(kept, again, strict=True):
        for name, gradient in one.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-12, atol=1e-14, msg=name)


def staged(world: World, plan: str) -> Held:
    made = iter([dropped(), dropped()])  # the engine's, and the one that is predicted from
    torch.manual_seed(3)
    return train(world, rows_task(lambda: next(made)), Case(f"{plan} fp64", steps=2))


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("plan", ["pp2 1f1b:3", "pp2 zb-v:2"])
def test_dropout_in_pipelines(plan: str, how: str):
    """Masks of a stage and a microbatch come again in its backward pass, I and W included."""
    without = run_gloo(2, staged, plan)
    found = run_gloo(2, staged, f"{plan} recompute:{how}")
    assert [held.losses for held in found] == [held.losses for held in without]
    for held, other in zip(found, without, strict=True):
        assert all(
            torch.equal(a.values, b.values)
            for a, b in zip(held.weights, other.weights, strict=True)
        )


@pytest.mark.parametrize("how", ["full", "selective"])
def test_zero3_gathers_as_often(how: str):
    """One gather serves the recomputation and the backward pass: the ledger is the same."""
    case = Case("dp2 zero3 fp64", units="auto")
    without, found = (
        run_threads(2, train, gpt_task(), Case(f"{case.plan}{word}", units="auto"))
        for word in ("", f" recompute:{how}")
    )
    for held, other in zip(found, without, strict=True):
        assert held.bytes == other.bytes
        assert held.lines == other.lines


def gathered(world: World, plan: str) -> int:
    """The bytes gathered in the backward pass of a second step."""
    task, case = gpt_task(rows=9), Case(f"{plan} fp64", steps=2)
    return sum(
        tally.sent_bytes
        for key, tally in train(world, task, case).lines.items()
        if key[:] == ("tp", "all_gather", "backward")
    )


def parts_of(plan: str) -> int:
    """The bytes of the inputs that rank 0 puts together, by prediction."""
    task = gpt_task(rows=9)
    value = Plan.parse(f"{plan} fp64")
    spec = model_spec(task.make(), value, 0, task.batch(0), task.loss, EngineOptions())
    return sum(part_bytes(value, spec, 0).values())


@pytest.mark.full
@pytest.mark.parametrize(("plan", "sends"), [("tp2", True), ("tp2 sp", False), ("tp4", True)])
def test_parts_of_inputs_are_gathered_once(plan: str, sends: bool):
    """Each block's input once for each recomputation, as predicted; under sp nothing more."""
    ranks, plan = ranks_of(plan), f"{plan} recompute:"
    full, parts = (run_threads(ranks, gathered, f"{plan}{how}") for how in ("full", "partitioned"))
    predicted = parts_of(f"{plan}partitioned")
    assert [b - a for a, b in zip(full, parts, strict=True)] == [predicted] * ranks
    assert (predicted > 0) == sends


def test_a_module_in_two_stages_is_refused():
    """It would be recomputed where one half of it is not."""

    def begin(world: World) -> str:
        model, plan = small_gpt(), "pp2 1f1b:2 recompute:full"
        with pytest.raises(InputError) as caught:
            sw.parallelize(model, plan, world, stages=["blocks.1.mlp"])
        return str(caught.value)

    for text in run_threads(2, begin):
        assert "recomputes blocks.1, with a stage that begins inside of it" in text


def freed(world: World) -> bool:
    """Whether the block of the other rank is freed when the engine has been built."""
    model = small_gpt()
    other = ref(model.get_submodule(f"blocks.{1 - world.rank}"))
    sw.parallelize(model, "pp2 fp64 1f1b:2 recompute:full", world, loss=gpt.loss)
    return other() is None


def test_a_pipeline_rank_frees_recomputed_layers_of_others():
    """Without waiting for the garbage collector: nothing refers to them."""
    gc.disable()
    try:
        assert run_threads(2, freed) == [True, True]
    finally:
        gc.enable()
