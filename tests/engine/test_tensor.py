"""Tensor and sequence parallelism, alone and with every row of the data table."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm.world import World
from shardwise.models import gpt
from shardwise.models.initial import fill
from tests.engine.cases import (
    ROWS,
    Case,
    Task,
    oracle,
    ranks_of,
    regression,
    text,
)
from tests.engine.tensors import (
    ADAMW,
    SMALL,
    Held,
    assert_counted,
    assert_parity,
    gpt_task,
    holds,
    train,
)
from tests.parallel.layers import KINDS, sequences, task
from tests.pool import run_gloo, run_threads

SGD: dict[str, Any] = {"kind": torch.optim.SGD, "options": {"lr": 0.1, "momentum": 0.9}}


HEADS = [("3 heads", "tp2"), ("3 heads", "tp2 sp"), ("3 heads", "tp3 sp")]
HEADS += [("6 heads, 2 for keys", f"tp{n}{sp}") for n in (2, 4) for sp in ("", " sp")]


@pytest.mark.parametrize(("shape", "plan"), HEADS)
def test_parity_of_heads_that_the_degree_does_not_divide(shape: str, plan: str):
    """3 heads on 2 ranks, 6 with 2 for keys on 4: ranks hold what they can, and it is the same."""
    holds(run_gloo, gpt_task(shape), Case(f"{plan} fp64", **ADAMW))


def train_kind(world: World, name: str, case: Case) -> Held:
    """The case on a kind of model, made on this side of the process."""
    return train(world, task(name), case)


SHARED = [f"dp2 tp2 {row}" for row in ROWS] + ["tp3", "tp4 sp", "dp2 tp2 sp zero3 accumulate:2"]
SHARED += ["pp2 tp2 1f1b:2", "pp2 tp2 zero1 zb-h1:3"]
OWN = [
    *((f"{plan} accumulate:2", name) for plan in ("tp2", "tp2 sp") for name in KINDS),
    *(
        ("dp2 tp2 sp zero3", name)
        for name in ("frozen columns", "recomputed", "6 heads, 2 for keys")
    ),
    *((plan, f"packed qkv, 6 heads, {1 + i % 2} for keys") for i, plan in enumerate(SHARED)),
]


@pytest.mark.cases(5)
@pytest.mark.parametrize(("plan", "name"), OWN)
def test_tables_of_ones_own_train(plan: str, name: str):
    """Biases, packed weights, recomputation, frozen parts, keys that ranks share: as one process.

    Bytes and memory are as predicted; what ranks share is summed and counted once.
    """
    case = Case(f"{plan} fp64", clip=0.5, **SGD)
    ranks = run_gloo(ranks_of(plan), train_kind, name, case)
    assert_parity(ranks, oracle(task(name), case), 1e-10)
    assert_counted(ranks)


def in_two_dtypes() -> nn.Module:
    """A stack whose inner layers are fp32, in a stream of fp64."""
    model = KINDS["biases, norm and residual inside"].model()
    for block in model.get_submodule("blocks").children():
        for layer in map(block.get_submodule, ("up", "down")):
            layer.float()
            layer.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    return model


@pytest.mark.parametrize("plan", ["tp2", "tp2 sp", "dp2 tp2 zero2", "dp2 tp2 sp zero3"])
def test_parameters_of_several_dtypes(plan: str):
    """fp32 layers in an fp64 model keep their dtype, and every move is counted in its own."""
    work = Task(in_two_dtypes, sequences, regression, None)
    case = Case(plan, clip=0.5, **SGD)
    ranks = run_gloo(ranks_of(plan), train, work, case)
    expected = oracle(work, case, None)
    assert_parity(ranks, expected, 1e-5)
    assert_counted(ranks)
    assert {p.values.dtype for p in ranks[0].weights} == {torch.float32, torch.float64}


def agreed(world: World) -> list[float]:
    """A buffer of a model that every rank made otherwise, once it is laid out."""
    model = KINDS["biases, norm and residual inside"].model()
    model.register_buffer("table", torch.full((3,), 1.0 + world.rank))
    sw.parallelize(model, "tp2 fp64", world, loss=regression)
    return model.get_buffer("table").tolist()


def test_the_first_ranks_buffers_are_everyones():
    """Its weights too, as the table of plans proves."""
    assert run_threads(2, agreed) == [[1.0] * 3] * 2


def lowered(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a model that computes in 16 bits as autocast says."""
    x, y = batch
    with torch.autocast("cpu", torch.bfloat16):
        return functional.mse_loss(model(x.float()), y.float())


@pytest.mark.parametrize("plan", ["tp2", "tp2 sp"])
def test_autocast_in_the_loss(plan: str):
    """Layers compute in 16 bits, weights and their gradients stay fp32: near one process's."""
    work, case = replace(task("gated"), loss=lowered), Case(f"{plan} fp32", **SGD)
    ranks = run_threads(2, train, work, case)
    assert_parity(ranks, oracle(work, case, torch.float32), 0.05)


def eight(step: int) -> dict[str, Tensor]:
    """Sequences that two and four ranks divide."""
    return {key: value[:, :8] for key, value in text(step, rows=6).items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_papers(ranks: int):
    """Per layer 4 sums of [B, T, D], one for each end, 3 numbers a position for the loss.

    Beside them one double of each rank to each other: whether its gradients are finite; no more.

    Under sp the same total, gathered and scattered, and the gradients of the norms. (arXiv
    1909.08053, section 3; arXiv 2205.05198, section 4.2.2.)
    """
    config = replace(SMALL, kv_heads=4, width=32)  # norms fill their groups
    made = partial(small, config)
    work = Task(made, eight)
    part, size = (ranks - 1) / ranks, 4
    stream = part * 6 * 8 * config.width * size  # what a gather or a scatter sends
    loss = 3 * 2 * part * 6 * 8 * size
    ends = 2 * config.layers + 1  # sums each way
    guard = {("all_gather", "check"): 8 * (ranks - 1)}
    (held, *_) = run_threads(ranks, train, work, Case(f"tp{ranks} fp32", steps=4))
    assert tensor_bytes(held) == guard | {
        ("all_reduce", "forward"): 2 * ends * stream + loss,
        ("all_reduce", "backward"): 2 * ends * stream,
    }
    (held, *_) = run_threads(ranks, train, work, Case(f"tp{ranks} sp fp32", steps=4))
    norms = 2 * part * ends * config.width * size
    assert tensor_bytes(held) == guard | {
        ("all_reduce", "forward"): loss,
        ("all_gather", "forward"): ends * stream,
        ("reduce_scatter", "forward"): ends * stream,
        ("all_gather", "backward"): ends * stream,
        ("reduce_scatter", "backward"): ends * stream,
        ("all_reduce", "backward"): norms,
    }


def small(config: gpt.GPTConfig) -> nn.Module:
    model = gpt.GPT(config)
    fill(model, seed=3)
    return model


def tensor_bytes(held: Held) -> dict[tuple[str, str], int]:
    """What the last step sent on the tensor axis, by kind and phase."""
    return {(k.kind, k.phase): t.sent_bytes for k, t in held.lines.items() if k.axis == "tp"}
