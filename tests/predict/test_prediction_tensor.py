"""Predictions of the tensor axis follow from styles; they equal what was sent, to the byte."""

from dataclasses import replace

import pytest

from shardwise.comm.world import World
from shardwise.core.plan import Plan
from shardwise.engine.prediction import predict_with
from shardwise.models.registry import find
from shardwise.verify.options import Options
from shardwise.verify.parity import SEED, build_options, engine_of
from tests.engine.cases import Case, build, foreseen, share, text
from tests.engine.tensors import gpt_task, sent
from tests.pool import run_threads

CASES = [
    *(("tp2", "tied"), ("tp2 sp", "untied"), ("tp4 sp", "6 heads, 2 for keys")),
    *(("dp2 tp2 sp zero3", "tied"), ("tp2 sp accumulate:2 bf16", "untied")),
    *(("pp2 tp2 1f1b:2", "tied"), ("pp2 tp2 sp zb-h1:2", "6 heads, 2 for keys")),
    ("dp2 tp2 zero1", "3 heads"),
]


def trained(world: World, plan: str, shape: str) -> list[bool]:
    """Of four steps, whether each sent what was predicted; and whether it holds what was."""
    task = gpt_task(shape)
    ours, theory = build(world, task, Case(plan)), foreseen(world, task, Case(plan))
    held: list[bool] = []
    for step in range(4):
        mine = share(text(step, rows=9), ours.data_rank, ours.data_ranks)
        told = theory.of(mine)
        ours.step(mine)
        held.append(sent(ours) == told.in_step(step))
    return [*held, ours.memory() == told.memory]


@pytest.mark.parametrize(("plan", "shape"), CASES)
def test_a_run_on_a_tensor_axis_is_as_predicted(plan: str, shape: str):
    """With sequences, heads and vocabularies that do not divide, and tied weights."""
    ranks = Plan.parse(plan).size
    assert run_threads(ranks, trained, plan, shape) == [[True] * 5] * ranks


def proved(world: World, plan: str, model: str) -> list[bool]:
    """Whether the third step of a model, as `verify` trains it, is as predicted."""
    trainable, read = find(model), Plan.parse(plan)
    ours = engine_of(trainable, read, world, clip=1.0)
    rows = trainable.batch(2 * ours.microbatches, SEED)
    for _ in range(4):
        ours.step(rows)
    options = build_options(trainable, read, Options())
    told = predict_with(trainable.build(), read, rows, replace(options, clip=1.0), world.rank)
    return [sent(ours) == told.sent(), ours.memory() == told.memory]


@pytest.mark.parametrize("plan", ["tp2 fp64", "tp2 sp fp64"])
@pytest.mark.parametrize("model", ["hf:llama", "hf:gpt2", "hf:gemma2", "hf:phi3"])
def test_models_of_transformers_are_as_predicted(plan: str, model: str):
    """By the tables that they come with."""
    pytest.importorskip("transformers")
    assert run_threads(2, proved, plan, model) == [[True] * 2] * 2
