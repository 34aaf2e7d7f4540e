"""A vision transformer of transformers, from a configuration: pictures in, classes out.

python examples/vit.py                 under zero3
python examples/vit.py "pp2 1f1b:4"    under another plan
"""

import sys

import torch
from torch import Tensor, nn

import shardwise as sw

STEPS, ROWS, CLASSES = 8, 16, 4


def build() -> nn.Module:
    """A small ViT with random weights."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=16,
        patch_size=4,
        num_channels=1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(config)


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean over the pictures."""
    pictures, classes = batch
    return nn.functional.cross_entropy(model(pixel_values=pictures).logits, classes)


def pictures() -> list[Tensor]:
    """Noise with a bright quarter, and the number of that quarter."""
    generator = torch.Generator().manual_seed(1)
    classes = torch.arange(ROWS) % CLASSES
    noise = 0.1 * torch.randn(ROWS, 1, 16, 16, generator=generator)
    for picture, number in zip(noise, classes.tolist(), strict=True):
        row, column = 8 * (number // 2), 8 * (number % 2)
        picture[:, row : row + 8, column : column + 8] += 1
    return [noise, classes]


def train(plan: str) -> list[float]:
    """Train on all ranks of the world; the loss of each step."""
    world = sw.init()
    model, table = build(), None
    if "tp" in plan:  # transformers has no plan of tensor parallelism for ViT
        table = sw.derive_table(model, pictures(), 2, loss_fn).table
    engine = sw.parallelize(
        model, plan, world, optimizer=sw.AdamW(lr=3e-3), loss=loss_fn, table=table
    )
    mine = [t.tensor_split(engine.data_ranks)[engine.data_rank] for t in pictures()]
    losses = [engine.step(mine).loss for _ in range(STEPS)]
    world.close()
    return losses


if __name__ == "__main__":
    plan = sys.argv[1] if len(sys.argv) > 1 else "zero3"
    alone = sw.spawn(train, ranks=1, args=("fp32",))[0]
    ranks = sw.spawn(train, ranks=2, args=(plan,))[0]
    for step, (one, two) in enumerate(zip(alone, ranks, strict=True), start=1):
        print(f"step {step}: one process {one:.6f}, two ranks {two:.6f}")
