"""LoRA by peft: adapters beside frozen layers, sharded in the same way as the layers.

python examples/lora.py                under tp2
python examples/lora.py zero3          under another plan

Under `tp2` an adapter gets the style of its layer: beside a layer that is sharded by columns, B is
sharded by columns; beside one that is sharded by rows, A is sharded by rows.
"""

import sys

import torch
from torch import Tensor, nn

import shardwise as sw

STEPS, ROWS, POSITIONS = 8, 8, 16
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def build() -> nn.Module:
    """A small Llama with random weights, frozen, and trained adapters of rank 4."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=LAYERS))


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean over all predicted tokens."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(plan: str) -> list[float]:
    """Train the adapters on all ranks of the world; the loss of each step."""
    world = sw.init()
    engine = sw.parallelize(build(), plan, world, optimizer=sw.AdamW(lr=3e-2), loss=loss_fn)
    tokens = torch.arange(ROWS * POSITIONS).view(ROWS, POSITIONS) * 7 % 8
    mine = tokens.tensor_split(engine.data_ranks)[engine.data_rank]
    losses = [engine.step(mine).loss for _ in range(STEPS)]

    state = sw.full_state_dict(engine)  # called by all ranks; the whole model is on rank 0
    if world.rank == 0:
        adapters = {name: t for name, t in state.items() if "lora_" in name}
        count = sum(t.numel() for t in adapters.values())
        print(f"{plan}: trained {count:,} of {sum(t.numel() for t in state.values()):,} numbers")
    world.close()
    return losses


if __name__ == "__main__":
    plan = sys.argv[1] if len(sys.argv) > 1 else "tp2"
    alone = sw.spawn(train, ranks=1, args=("fp32",))[0]
    ranks = sw.spawn(train, ranks=2, args=(plan,))[0]
    for step, (one, two) in enumerate(zip(alone, ranks, strict=True), start=1):
        print(f"step {step}: one process {one:.6f}, two ranks {two:.6f}")
