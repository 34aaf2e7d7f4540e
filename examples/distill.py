"""Distillation: a small model learns the probabilities of a large one.

python examples/distill.py             under zero3
python examples/distill.py "pp2 1f1b:4"     under another plan

The teacher is no part of what is trained: each rank has a copy, and the loss calls it. A teacher
that is too large for a rank is sharded by `sw.FSDP(teacher)`.
"""

import sys
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

import shardwise as sw

STEPS, ROWS, FEATURES, CLASSES, HOT = 8, 32, 8, 6, 2.0


class Residual(nn.Module):
    """x plus two layers of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] -> [rows, width]."""
        return x + self.down(torch.relu(self.up(x)))


def classifier(width: int, depth: int, seed: int) -> nn.Sequential:
    """Logits [rows, CLASSES] of rows of FEATURES."""
    torch.manual_seed(seed)
    blocks = [Residual(width) for _ in range(depth)]
    return nn.Sequential(nn.Linear(FEATURES, width), *blocks, nn.Linear(width, CLASSES))


def loss_fn(teacher: nn.Module, model: nn.Module, rows: Tensor) -> Tensor:
    """The divergence from softened probabilities (Hinton et al., arXiv 1503.02531, section 2)."""
    with torch.no_grad():
        wanted = (teacher(rows) / HOT).log_softmax(-1)
    found = (model(rows) / HOT).log_softmax(-1)
    return kl_div(found, wanted, reduction="batchmean", log_target=True) * HOT**2


def train(plan: str) -> list[float]:
    """Train the student on all ranks of the world; the loss of each step."""
    world = sw.init()
    loss = partial(loss_fn, classifier(64, 6, seed=1).requires_grad_(False))
    adamw = sw.AdamW(lr=1e-2)
    engine = sw.parallelize(classifier(16, 4, seed=2), plan, world, optimizer=adamw, loss=loss)
    rows = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(0))
    mine = rows.tensor_split(engine.data_ranks)[engine.data_rank]
    losses = [engine.step(mine).loss for _ in range(STEPS)]
    world.close()
    return losses


if __name__ == "__main__":
    plan = sys.argv[1] if len(sys.argv) > 1 else "zero3"
    alone = sw.spawn(train, ranks=1, args=("fp32",))[0]
    ranks = sw.spawn(train, ranks=2, args=(plan,))[0]
    for step, (one, two) in enumerate(zip(alone, ranks, strict=True), start=1):
        print(f"step {step}: one process {one:.6f}, two ranks {two:.6f}")
