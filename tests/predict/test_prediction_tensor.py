"""Predictions for models of transformers on a tensor axis equal what was sent, to the byte."""

from dataclasses import replace

import pytest

from shardwise.comm.world import World
from shardwise.core.plan import Plan
from shardwise.engine.prediction import predict_with
from shardwise.models.registry import find
from shardwise.verify.options import Options
from shardwise.verify.parity import SEED, build_options, engine_of
from tests.engine.tensors import sent
from tests.pool import run_threads


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
