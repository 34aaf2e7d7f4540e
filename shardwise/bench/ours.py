"""This file is Shardwise among the contenders: the rows of its states table, by plan word."""

from collections.abc import Callable

from torch import nn

from shardwise.bench.contender import (
    LEARNING_RATE,
    WEIGHT_DECAY,
    Batch,
    Contender,
    Setup,
    Step,
)
from shardwise.core.states import ROWS
from shardwise.models import gpt


def row(word: str) -> Callable[[nn.Module, Setup], Step]:
    """`sw.parallelize` with that row over all ranks."""

    def build(model: nn.Module, setup: Setup) -> Step:
        import shardwise as sw

        engine = sw.parallelize(
            model,
            f"dp{setup.ranks} {word} {setup.precision}",
            sw.init(setup.device.type),
            optimizer=sw.AdamW(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
            loss=setup.loss,
            tokens=gpt.tokens,
        )

        def step(batch: Batch) -> float:
            return engine.step(batch).loss

        return step

    return build


OURS = tuple(Contender(word, word, row(word)) for word in ROWS)
