"""A T5 of transformers: an encoder and a decoder, from a configuration.

python examples/t5.py                  under zero3
python examples/t5.py tp2              under another plan
"""

import sys

import torch
from torch import Tensor, nn

import shardwise as sw

STEPS, ROWS, POSITIONS, VOCABULARY = 8, 8, 12, 64


def build() -> nn.Module:
    """A small T5 with random weights."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all target tokens, of which every row has the same number."""
    return model(input_ids=batch["inputs"], labels=batch["targets"]).loss


def train(plan: str) -> list[float]:
    """Train on all ranks of the world to write the inputs backwards; the loss of each step."""
    world = sw.init()
    model, table = build(), None
    inputs = torch.randint(
        2, VOCABULARY, (ROWS, POSITIONS), generator=torch.Generator().manual_seed(1)
    )
    batch = {"inputs": inputs, "targets": inputs.flip(1)}
    if "tp" in plan:  # transformers has no plan of tensor parallelism for T5
        table = sw.derive_table(model, batch, 2, loss_fn).table
    engine = sw.parallelize(
        model, plan, world, optimizer=sw.AdamW(lr=1e-2), loss=loss_fn, table=table
    )
    mine = {name: t.tensor_split(engine.data_ranks)[engine.data_rank] for name, t in batch.items()}
    losses = [engine.step(mine).loss for _ in range(STEPS)]
    world.close()
    return losses


if __name__ == "__main__":
    plan = sys.argv[1] if len(sys.argv) > 1 else "zero3"
    alone = sw.spawn(train, ranks=1, args=("fp32",))[0]
    ranks = sw.spawn(train, ranks=2, args=(plan,))[0]
    for step, (one, two) in enumerate(zip(alone, ranks, strict=True), start=1):
        print(f"step {step}: one process {one:.6f}, two ranks {two:.6f}")
