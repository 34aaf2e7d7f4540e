"""A gradient penalty: the loss has the gradient of the model by its inputs, as in WGAN-GP.

python examples/gradient_penalty.py         under zero1
python examples/gradient_penalty.py ddp     under ddp

A gradient of a gradient needs the full parameters: `ddp` and `zero1` have them, and the optimizer's
state is still sharded under `zero1`. `zero3` refuses the second derivative.
"""

import sys

import torch
from torch import Tensor, nn

import shardwise as sw

STEPS, ROWS, FEATURES = 8, 16, 8


def loss_fn(critic: nn.Module, batch: list[Tensor]) -> Tensor:
    """The critic's loss: its mean on false rows less that on real ones, and the penalty."""
    real, false = batch
    between = ((real + false) / 2).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return critic(false).mean() - critic(real).mean() + 10 * penalty


def train(plan: str) -> list[float]:
    """Train a critic on all ranks of the world; the loss of each step."""
    world = sw.init()
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    critic.append(nn.Linear(32, 1))
    engine = sw.parallelize(critic, plan, world, optimizer=sw.Adam(lr=1e-3), loss=loss_fn)
    generator = torch.Generator().manual_seed(1)
    real, false = torch.randn(2, ROWS, FEATURES, generator=generator)
    mine = [t.tensor_split(engine.data_ranks)[engine.data_rank] for t in (real + 1, false)]
    losses = [engine.step(mine).loss for _ in range(STEPS)]
    world.close()
    return losses


if __name__ == "__main__":
    plan = sys.argv[1] if len(sys.argv) > 1 else "zero1"
    alone = sw.spawn(train, ranks=1, args=("fp32",))[0]
    ranks = sw.spawn(train, ranks=2, args=(plan,))[0]
    for step, (one, two) in enumerate(zip(alone, ranks, strict=True), start=1):
        print(f"step {step}: one process {one:.6f}, two ranks {two:.6f}")
