"""A GAN: a generator and a discriminator, an engine for each.

python examples/gan.py                 under zero3
python examples/gan.py ddp             under another plan of data parallelism

A step of an engine trains its own model alone. So the generator's loss uses a plain copy of the
discriminator, which gets the trained weights after each step: a rank holds the discriminator once
more, and its states stay sharded.
"""

import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import shardwise as sw

STEPS, ROWS, NOISE = 6, 32, 4


def layers(inputs: int, outputs: int) -> nn.Sequential:
    """Three layers of 32 features."""
    first, second = nn.Linear(inputs, 32), nn.Linear(32, 32)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), nn.Linear(32, outputs))


def discriminator_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """It says "real" of real rows, and not of generated ones."""
    real, made = batch
    return softplus(-model(real)).mean() + softplus(model(made)).mean()


@torch.no_grad()
def copy_weights(engine: sw.Engine, plain: nn.Module) -> None:
    """The engine's full weights into a plain model; called by all ranks."""
    for name, p in plain.named_parameters():
        p.copy_(engine.model.get_parameter(name))  # gathers sharded weights


def train(plan: str) -> list[float]:
    """Train both on all ranks of the world; the losses of each step, the discriminator's first."""
    world = sw.init()
    torch.manual_seed(0)
    generator, discriminator = layers(NOISE, 2), layers(2, 1)
    judge = copy.deepcopy(discriminator).requires_grad_(False)

    def generator_loss(model: nn.Module, noise: Tensor) -> Tensor:
        return softplus(-judge(model(noise))).mean()

    adam = sw.Adam(lr=2e-3, betas=(0.5, 0.999))
    judging = sw.parallelize(discriminator, plan, world, optimizer=adam, loss=discriminator_loss)
    making = sw.parallelize(generator, plan, world, optimizer=adam, loss=generator_loss)
    losses: list[float] = []
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(step)
        real = torch.randn(ROWS, 2, generator=numbers) + 2
        noise = torch.randn(ROWS, NOISE, generator=numbers)
        real, noise = (t.tensor_split(world.size)[world.rank] for t in (real, noise))
        with torch.no_grad():
            made = making.model(noise)
        losses.append(judging.step([real, made]).loss)
        copy_weights(judging, judge)
        losses.append(making.step(noise).loss)
    world.close()
    return losses


if __name__ == "__main__":
    plan = sys.argv[1] if len(sys.argv) > 1 else "zero3"
    alone = sw.spawn(train, ranks=1, args=("fp32",))[0]
    ranks = sw.spawn(train, ranks=2, args=(plan,))[0]
    for number, (one, two) in enumerate(zip(alone, ranks, strict=True)):
        of = "generator" if number % 2 else "discriminator"
        print(f"step {number // 2 + 1}, {of}: one process {one:.6f}, two ranks {two:.6f}")
