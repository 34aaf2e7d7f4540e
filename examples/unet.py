"""A U-Net with skips that cross the stages of a pipeline.

python examples/unet.py                two stages, four microbatches
python examples/unet.py zero3          under another plan

    picture -> down1 -> down2 -> middle -> up2 -> up1 -> picture
                 |        '----------------'       |
                 '---------------------------------'
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw

STEPS, ROWS, SIDE = 8, 8, 16


class Convolutions(nn.Module):
    """Two convolutions that keep height and width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Features of the same height and width."""
        return functional.gelu(self.second(functional.gelu(self.first(x))))


class UNet(nn.Module):
    """Removes noise from pictures of one channel."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1 = Convolutions(1, width)
        self.down2 = Convolutions(width, 2 * width)
        self.middle = Convolutions(2 * width, 2 * width)
        self.up2 = Convolutions(4 * width, width)
        self.up1 = Convolutions(2 * width, width)
        self.leave = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Pictures without the noise, of the same shape."""
        fine = self.down1(x)
        coarse = self.down2(functional.max_pool2d(fine, 2))
        low = self.middle(functional.max_pool2d(coarse, 2))
        low = self.up2(torch.cat([functional.interpolate(low, scale_factor=2), coarse], dim=1))
        return self.leave(
            self.up1(torch.cat([functional.interpolate(low, scale_factor=2), fine], 1))
        )


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean square error."""
    noisy, clean = batch
    return (model(noisy) - clean).square().mean()


def train(plan: str) -> list[float]:
    """Train on all ranks of the world; the loss of each step."""
    world = sw.init()
    torch.manual_seed(0)
    engine = sw.parallelize(UNet(), plan, world, optimizer=sw.AdamW(lr=3e-3), loss=loss_fn)
    generator = torch.Generator().manual_seed(1)
    clean = (torch.rand(ROWS, 1, 4, 4, generator=generator)).repeat_interleave(4, 2)
    clean = clean.repeat_interleave(4, 3)
    noisy = clean + 0.1 * torch.randn(ROWS, 1, SIDE, SIDE, generator=generator)
    mine = [t.tensor_split(engine.data_ranks)[engine.data_rank] for t in (noisy, clean)]
    losses = [engine.step(mine).loss for _ in range(STEPS)]
    world.close()
    return losses


if __name__ == "__main__":
    plan = sys.argv[1] if len(sys.argv) > 1 else "pp2 1f1b:4"
    alone = sw.spawn(train, ranks=1, args=("fp32",))[0]
    ranks = sw.spawn(train, ranks=2, args=(plan,))[0]
    for step, (one, two) in enumerate(zip(alone, ranks, strict=True), start=1):
        print(f"step {step}: one process {one:.6f}, two ranks {two:.6f}")
