"""The recipe of docs/how-to/one-technique.md for an average of weights, under each wrapper."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World
from tests.engine.cases import refusal, squares
from tests.engine.loops import rows
from tests.engine.zoo import make
from tests.pool import run_threads

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "one-technique.md"
STEPS, RATE = 3, 0.5


def recipe() -> dict[str, Any]:
    """The functions that the page defines."""
    section = PAGE.read_text().split("## An average of weights")[1]
    found: dict[str, Any] = {"torch": torch}
    code = re.findall("```python\n(.*?)```", section, re.DOTALL)[0]
    exec(code, found)  # noqa: S102
    return found


def model() -> nn.Module:
    return make("stack").double()


def with_average(world: World, how: str) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The loss of the average, its weights, and the trained weights after it."""
    page, engine = recipe(), None
    if how.startswith("dp"):
        engine = sw.parallelize(model(), how, world, optimizer=sw.SGD(lr=0.1), loss=squares)
    wrapped = sw.DDP(model(), world) if how == "DDP" else engine and engine.model
    wrapped = wrapped or sw.FSDP(model(), how, world=world)
    optim = None if engine else torch.optim.SGD(wrapped.parameters(), lr=0.1)
    average = {name: p.detach().clone() for name, p in wrapped.named_parameters()}
    for step in range(STEPS):
        if engine is not None:
            engine.step(rows(step, world.rank))
        if optim is not None:
            squares(wrapped, rows(step, world.rank)).backward()
            optim.step()
            optim.zero_grad()
        page["follow"](average, wrapped, RATE)
    with page["averaged"](average, wrapped), torch.no_grad():
        value = engine.evaluate(rows(9, 0))[0] if engine else float(squares(wrapped, rows(9, 0)))
        weights = deepcopy(sw.full_state_dict(engine or wrapped))
    return value, weights, deepcopy(sw.full_state_dict(engine or wrapped))


def plain() -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The same of one process."""
    module = model()
    optim = torch.optim.SGD(module.parameters(), lr=0.1)
    average = deepcopy(module)
    for step in range(STEPS):
        torch.stack([squares(module, rows(step, rank)) for rank in (0, 1)]).mean().backward()
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            for a, p in zip(average.parameters(), module.parameters(), strict=True):
                a.lerp_(p, RATE)
    return (
        squares(average, rows(9, 0)).item(),
        dict(average.state_dict()),
        dict(module.state_dict()),
    )


@pytest.mark.parametrize("how", ["DDP", "FULL_SHARD", "SHARD_GRAD_OP", "dp2", "dp2 zero3"])
def test_the_recipe_averages_evaluates_and_goes_back(how: str):
    """Loss, averaged weights and trained weights are those of one process."""
    found, expected = run_threads(2, with_average, how)[0], plain()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def copied(world: World) -> str:
    return refusal(lambda: torch.optim.swa_utils.AveragedModel(sw.FSDP(model(), world=world)))


def test_a_copy_for_an_average_names_the_recipe():
    """Torch's class copies the module."""
    assert (
        "for an average of weights the loop in docs/how-to/one-technique.md"
        in run_threads(2, copied)[0]
    )
