"""How often units are gathered, of models that call a module several times, or never."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.engine.cases import Case, Task, regression, settled, vectors
from tests.engine.tensors import holds
from tests.pool import run_threads

SGD = {"kind": torch.optim.SGD, "options": {"lr": 0.1, "momentum": 0.9}}


class Winding(nn.Module):
    """Blocks in an order of its own: some twice, one never."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.blocks = way, nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in map(int, self.way):
            x = self.blocks[block](x).tanh()
        return x


def twice(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss of a part that is called by itself, and of two passes."""
    assert isinstance(model, Winding)
    return regression(model, batch) + regression(model, (model.blocks[1](batch[0]), batch[1]))


WINDING = {
    f"{way}{' twice' * (loss is twice)}": Task(
        partial(lambda way: settled(Winding(way)), way), vectors, loss, None
    )
    for way in ("012", "0012", "0120", "2012", "010", "20202", "1")
    for loss in (regression, twice)
}


@pytest.mark.parametrize("name", WINDING)
def test_a_unit_is_gathered_as_often_as_it_is_used(name: str, monkeypatch: pytest.MonkeyPatch):
    """Once for each call forward, once backward; and one that is not called never."""
    monkeypatch.setattr("shardwise.techniques.data.apply.LEAST_BYTES", 0)
    holds(run_threads, WINDING[name], Case("dp2 zero3 fp64", **SGD))
