"""This file is Shardwise among the contenders, by plan words."""

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
from shardwise.comm.torch_links import TorchLinks
from shardwise.core.states import ROWS
from shardwise.models import gpt


def engine_of(model: nn.Module, plan: str, setup: Setup) -> sw.Engine:
    """The engine of that plan, "dp{n} zero1", for n ranks, with the optimizer everyone gets."""
    return sw.parallelize(
        model,
        f"{plan.format(n=setup.ranks)} {setup.precision}",
        sw.init(setup.device.type),
        optimizer=sw.AdamW(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        loss=setup.loss,
        tokens=gpt.tokens,
    )


def planned(plan: str) -> Callable[[nn.Module, Setup], Loop]:
    """`sw.parallelize` with that plan over all ranks."""

    def build(model: nn.Module, setup: Setup) -> Loop:
        """The model laid out by this plan."""
        engine = engine_of(model, plan, setup)

        def step(batch: Batch) -> float:
            return engine.step(batch).loss

        def settle() -> None:
            # whole parameters are gathered beside the next forward pass, as its units need them
            engine.wait()

        links = engine.world.links

        def shared_bytes() -> int:
            return links.shared_bytes if isinstance(links, TorchLinks) else 0

        return Loop(step, settle, shared_bytes)

    return build


DATA = tuple(Contender(word, word, planned(f"dp{{n}} {word}")) for word in ROWS)
TENSOR = (
    Contender("tp", "tp", planned("tp{n}"), whole_batch=True),
    Contender("tp sp", "tp sp", planned("tp{n} sp"), whole_batch=True),
)
