"""Train a model of transformers on any plan: from a configuration or a folder, to saved weights.

python examples/hf.py                                     a small Llama, made from a configuration
python examples/hf.py "tp2" --from runs/hf/weights        continues from a folder with weights
torchrun --nproc_per_node 2 examples/hf.py                under torchrun

The weights are in runs/hf/weights, as `save_pretrained` writes them.
"""

import argparse
import inspect
import os
from pathlib import Path

import torch

import shardwise as sw

FOLDER = Path("runs/hf/weights")
POSITIONS = 32


def model_of(folder: str | None) -> torch.nn.Module:
    """The model in the folder, or a small one with random weights: a token is a byte."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config)


def rows_of(text: str) -> torch.Tensor:
    """Tokens [rows, positions]. With a tokenizer: AutoTokenizer.from_pretrained(folder)(text)."""
    tokens = torch.tensor(list(text.encode()))
    return tokens[: len(tokens) // POSITIONS * POSITIONS].view(-1, POSITIONS)


def loss_fn(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The mean over all predicted tokens, of which every row has the same number."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(plan: str, folder: str | None, steps: int) -> float:
    """Train on all ranks of the world, save the weights; the last loss."""
    world = sw.init()
    torch.manual_seed(0)
    model = model_of(folder)
    config = model.config
    engine = sw.parallelize(model, plan, world, optimizer=sw.AdamW(lr=3e-3), loss=loss_fn, clip=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, steps)

    rows = rows_of(inspect.getsource(argparse))
    for step in range(steps):
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(step))[:16]
        mine = chosen.tensor_split(engine.data_ranks)[engine.data_rank]
        metrics = engine.step(rows[mine])
        schedule.step()
        if world.rank == 0:
            print(f"step {step + 1}: loss {metrics.loss:.4f}")

    state = sw.full_state_dict(engine)  # called by all ranks; the whole model is on rank 0
    if world.rank == 0:
        from transformers import AutoModelForCausalLM

        whole = AutoModelForCausalLM.from_config(config)
        whole.load_state_dict(state)
        whole.save_pretrained(FOLDER)
    world.close()
    return metrics.loss


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    words.add_argument("plan", nargs="?", default="zero3")
    words.add_argument("--from", dest="folder")
    words.add_argument("--steps", type=int, default=20)
    given = words.parse_args()
    args = (given.plan, given.folder, given.steps)
    if "RANK" in os.environ:  # torchrun has started this process as one of the ranks
        train(*args)
    else:
        sw.spawn(train, ranks=sw.Plan.parse(given.plan).completed().size, args=args)
