"""A training script of one's own: model, data, loop, checkpoint, on any plan.

torchrun --nproc_per_node 2 examples/train.py                  under torchrun
python examples/train.py                                       starts two ranks by itself
python examples/train.py "pp2 1f1b:4"                          under another plan
python examples/train.py "tp2" --resume                        five epochs more, from the last one
torchrun --nproc_per_node 2 --max-restarts 3 examples/train.py --resume auto
                                                               starts, or continues after a restart
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shardwise as sw

FOLDER = Path("runs/example")


class Block(nn.Module):
    """A residual feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape as x."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Classifies points into two classes."""

    def __init__(self, width: int = 64, blocks: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.leave = nn.Linear(width, 2)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Logits of the classes, a row for each point."""
        return self.leave(self.blocks(self.enter(points)))


#: The layers that tensor parallelism shards; other plans do not read it.
TABLE = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """The mean over the batch's own rows."""
    points, classes = batch
    return functional.cross_entropy(model(points), classes)


def squares(count: int) -> TensorDataset:
    """Points between -1 and 1, of class 1 where both coordinates have the same sign."""
    points = torch.rand(count, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return TensorDataset(points, (points.prod(dim=1) > 0).long())


def train(plan: str, resume: str) -> float:
    """Train on all ranks of the world; the last loss. `resume`: "", "always" or "auto"."""
    world = sw.init()
    torch.manual_seed(0)
    engine = sw.parallelize(
        Model(), plan, world, optimizer=sw.AdamW(lr=3e-3), loss=loss_fn, clip=1.0, table=TABLE
    )
    extra = sw.load(engine, FOLDER, missing_ok=resume == "auto") if resume else {}
    first = extra.get("epoch", 0)
    last = first + 5 if resume == "always" else 5

    data = squares(4096)
    # Ranks that differ only along tp or pp have the same data rank, so they get the same rows.
    sampler = DistributedSampler(data, engine.data_ranks, engine.data_rank, seed=0)
    loader = DataLoader(data, batch_size=256 // engine.data_ranks, sampler=sampler, drop_last=True)
    loss = float("nan")
    for epoch in range(first, last):
        sampler.set_epoch(epoch)
        for batch in loader:
            metrics = engine.step(batch)
        loss = metrics.loss
        if world.rank == 0:
            print(f"step {engine.steps}: loss {loss:.4f}, sent {metrics.bytes} bytes")
        sw.save(engine, FOLDER, extra={"epoch": epoch + 1}, keep=2)

    world.close()
    return loss


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word not in ("--resume", "auto")]
    resume = "" if "--resume" not in sys.argv else "auto" if "auto" in sys.argv else "always"
    given = (words[0] if words else "zero3", resume)
    if "RANK" in os.environ:  # torchrun has started this process as one of the ranks
        train(*given)
    else:
        sw.spawn(train, ranks=sw.Plan.parse(given[0]).completed().size, args=given)
