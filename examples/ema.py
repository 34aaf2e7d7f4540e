"""An exponential moving average of the weights, kept by each rank for its own pieces.

python examples/ema.py                 under zero3
python examples/ema.py ddp             under another plan of data parallelism

The average costs one more copy of the weights that a rank holds, and no communication.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import shardwise as sw

STEPS = 12


class Average:
    """The moving average of a model's weights."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        self.model, self.rate = model, rate
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def follow(self) -> None:
        """Call it after each step."""
        for name, p in self.model.named_parameters():
            self.values[name].lerp_(p, self.rate)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """On all ranks: the model has the average inside, and its own weights afterwards."""
        trained = {name: p.data for name, p in self.model.named_parameters()}
        self._assign(self.values)
        try:
            yield
        finally:
            self._assign(trained)

    def _assign(self, values: dict[str, Tensor]) -> None:
        for name, p in self.model.named_parameters():
            p.data = values[name]


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean square error."""
    x, y = batch
    return (model(x) - y).square().mean()


def train(plan: str) -> list[float]:
    """Train on all ranks; the loss of each step, then that of the model and of its average."""
    world = sw.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    engine = sw.parallelize(model, plan, world, optimizer=sw.AdamW(lr=3e-2), loss=loss_fn)
    average = Average(engine.model, rate=0.2)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    batch = [t.tensor_split(engine.data_ranks)[engine.data_rank] for t in (x, x.sin().sum(1, True))]
    losses: list[float] = []
    for _ in range(STEPS):
        losses.append(engine.step(batch).loss)
        average.follow()
    own, _ = engine.evaluate(batch)
    with average.applied():
        averaged, _ = engine.evaluate(batch)
        weights = sw.full_state_dict(engine)  # of the average: for a plain model, on rank 0
    if world.rank == 0:
        print(f"{plan}: loss {own:.6f}, of the average {averaged:.6f}, {len(weights)} tensors")
    world.close()
    return [*losses, own, averaged]


if __name__ == "__main__":
    plan = sys.argv[1] if len(sys.argv) > 1 else "zero3"
    alone = sw.spawn(train, ranks=1, args=("fp32",))[0]
    ranks = sw.spawn(train, ranks=2, args=(plan,))[0]
    for one, two in zip(alone, ranks, strict=True):
        print(f"one process {one:.6f}, two ranks {two:.6f}")
