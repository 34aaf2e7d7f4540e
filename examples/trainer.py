"""A script of transformers' Trainer under a plan: the import and `plan=` are all that changes.

torchrun --nproc_per_node 2 examples/trainer.py            two ranks, all states sharded
torchrun --nproc_per_node 2 examples/trainer.py tp2        under another plan
torchrun --nproc_per_node 2 examples/trainer.py --resume   from the last checkpoint
python examples/trainer.py                                 one process

The trained model is in runs/trainer/model, as `save_pretrained` writes it.
"""

import argparse
import inspect

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

from shardwise.hf import Trainer  # instead of: from transformers import Trainer

POSITIONS = 32


class Text(Dataset[dict[str, torch.Tensor]]):
    """Rows of a text, a token for each byte. With a tokenizer: AutoTokenizer.from_pretrained."""

    def __init__(self, text: str) -> None:
        tokens = torch.tensor(list(text.encode()))
        self.rows = tokens[: len(tokens) // POSITIONS * POSITIONS].view(-1, POSITIONS)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    """Train for 20 steps, and save the model."""
    words = argparse.ArgumentParser()
    words.add_argument("plan", nargs="?", default="zero3")
    words.add_argument("--resume", action="store_true")
    given = words.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
    )
    args = TrainingArguments(
        output_dir="runs/trainer",
        max_steps=20,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        warmup_steps=5,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=args,
        train_dataset=Text(inspect.getsource(argparse)),
        eval_dataset=Text(inspect.getsource(inspect)[:4000]),
        plan=given.plan,
    )
    trainer.train(resume_from_checkpoint=given.resume)
    trainer.save_model("runs/trainer/model")


if __name__ == "__main__":
    main()
