"""This file is Shardwise among the contenders: the rows of its states table, by plan word."""

from collections.abc import Callable

from torch import nn

import shardwise as sw
from shardwise.bench.contender import (
    LEARNING_RATE,
    WEIGHT_DECAY,
    Batch,
    Contender,
    Loop,
    Setup,
)
from shardwise.core.states import ROWS
from shardwise.models import gpt


def engine_of(model: nn.Module, word: str, setup: Setup) -> sw.Engine:
    """The engine of that row over all ranks, with the optimizer everyone gets."""
    return sw.parallelize(
        model,
        f"dp{setup.ranks} {word} {setup.precision}",
        sw.init(setup.device.type),
        optimizer=sw.AdamW(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        loss=setup.loss,
        tokens=gpt.tokens,
    )


def row(word: str) -> Callable[[nn.Module, Setup], Loop]:
    """`sw.parallelize` with that row over all ranks."""

    def build(model: nn.Module, setup: Setup) -> Loop:
        """The model laid out by this row."""
        engine = engine_of(model, word, setup)

        def step(batch: Batch) -> float:
            return engine.step(batch).loss

        def settle() -> None:
            # whole parameters are gathered beside the next forward pass, as its units need them
            engine.wait()

        return Loop(step, settle)

    return build


OURS = tuple(Contender(word, word, row(word)) for word in ROWS)
