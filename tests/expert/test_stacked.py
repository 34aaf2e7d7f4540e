"""Experts of transformers over the axis `ep`, against the library's model in one process."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import NonFiniteError
from shardwise.models import hf
from shardwise.models.registry import find
from shardwise.parallel.expert.stacked import stacked_experts
from tests.engine.cases import Task, small_gpt
from tests.expert import moe
from tests.pool import run_gloo

pytest.importorskip("transformers")


def made(name: str) -> nn.Module:
    return find(f"hf:{name}").build()


def batch(name: str, rows: int, step: int) -> dict[str, Tensor]:
    return find(f"hf:{name}").batch(rows, step)


def task(name: str, rows: int) -> Task:
    """A small model of the type on uniform random words."""
    return Task(partial(made, name), partial(batch, name, rows), hf.causal_loss, hf.tokens)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "plan", "rows"),
    [
        ("mixtral", "dp2 ep2 zero3 accumulate:2", 5),
        ("qwen3_moe", "dp4 ep4 zero3", 2),
        ("qwen2_moe", "dp2 ep2 pp2 1f1b:2", 5),
        ("deepseek_v3", "dp2 tp2 ep2", 5),
        ("gpt_oss", "dp2 ep2", 3),
        ("qwen3_moe", "dp2 tp2 ep2 sp", 5),
    ],
)
def test_parity(name: str, plan: str, rows: int):
    """Losses, gradients, weights and bytes are as foreseen; with 2 rows, two ranks have none."""
    moe.holds(task(name, rows), plan)


def test_found_by_their_signature():
    """The stacks of a mixture are its modules of experts; a dense model has none."""
    assert list(stacked_experts(made("mixtral"))) == [
        f"model.layers.{n}.mlp.experts" for n in (0, 1)
    ]
    assert stacked_experts(small_gpt()) == {}


def one_rank_diverges(world: World, on_nonfinite: str) -> None:
    """The embedding of one word is NaN, and only rank 1 reads it."""
    mixtral, sgd = task("mixtral", 2), sw.SGD(lr=0.1)
    how = {"loss": mixtral.loss, "on_nonfinite": on_nonfinite}
    engine = sw.parallelize(mixtral.make(), "dp2 ep2 fp64", world, optimizer=sgd, **how)
    with torch.no_grad():
        engine.model.get_parameter("model.embed_tokens.weight")[36] = torch.nan
    words = torch.full((1, 8), 36 if world.rank else 4)
    batch = {"inputs": words, "targets": words}
    if on_nonfinite == "skip":
        assert engine.step(batch).skipped
        return
    match = r"^Step 1: .*layers\.0\.mlp\.experts gave .* on rank 1 of"
    with pytest.raises(NonFiniteError, match=match):
        engine.step(batch)


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_router_that_is_not_finite(on_nonfinite: str):
    """Weights that are NaN on one rank stop the step on all of the axis, or all skip it."""
    run_gloo(2, one_rank_diverges, on_nonfinite)
