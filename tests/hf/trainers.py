"""A small Trainer, alone or under a plan, and what its run leaves behind."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

from shardwise.comm.world import World
from shardwise.hf import Trainer

VOCABULARY, POSITIONS, ROWS = 48, 10, 20
#: What is measured in seconds.
TIMES = ("runtime", "per_second")


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of random tokens, of which the last are not predicted: each row has another number."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(3, VOCABULARY, (count, POSITIONS), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.rows[index]
        end = POSITIONS // 2 + index % (POSITIONS // 2)
        labels = ids.masked_fill(torch.arange(POSITIONS) >= end, -100)
        return {"input_ids": ids, "labels": labels}


class Counts(TrainerCallback):
    """How often each event of a run came."""

    def __init__(self) -> None:
        self.events: dict[str, int] = {}

    def _count(self, name: str) -> None:
        self.events[name] = self.events.get(name, 0) + 1

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._count("train")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._count("step")

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self._count("substep")

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._count("evaluate")

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self._count("save")

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        self._count("log")


def model(kind: str = "llama") -> Any:
    """A model with the same weights in each call; dropout is 0."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=kind == "tied",
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def arguments(folder: Path | str, **changes: Any) -> TrainingArguments:
    """Two epochs, with evaluation and checkpoints."""
    given: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 1,
    }
    return TrainingArguments(str(folder), **given | changes)


@dataclass
class Run:
    """What a run leaves: its log, the whole weights on rank 0, and counts of events."""

    log: list[dict[str, float]]
    weights: dict[str, Tensor]
    events: dict[str, int] = field(default_factory=dict)


@contextmanager
def processes(world: World | None) -> Iterator[None]:
    """The environment of a launcher for the ranks of `world`; None: none."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.pop(name, None) for name in names}
    if world is not None:
        values = (world.rank, world.rank, world.size, "127.0.0.1", 1)  # the group exists
        os.environ.update({name: str(value) for name, value in zip(names, values, strict=True)})
    states = (AcceleratorState, GradientState, PartialState)
    for state in states:
        state._reset_state()
    try:
        yield
    finally:
        for state in states:
            state._reset_state()
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def trained(
    world: World | None,
    folder: str,
    plan: str | None,
    kind: str = "llama",
    changes: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> Run:
    """Train and save the whole model in `folder/final`; on one process without a plan.

    `changes` are TrainingArguments, `options` arguments of Trainer and of its `train`.
    """
    options = dict(options or {})
    resume = options.pop("resume_from_checkpoint", None)
    with processes(world if plan else None):
        counts = Counts()
        given: dict[str, Any] = {
            "model": model(kind),
            "args": arguments(folder, **changes or {}),
            "train_dataset": Rows(ROWS),
            "eval_dataset": Rows(11, seed=1),
            "callbacks": [counts],
        } | options
        if plan is None:
            trainer: Any = given.pop("trainer", transformers.Trainer)(**given)
        else:
            trainer = given.pop("trainer", Trainer)(**given, plan=plan, world=world)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(f"{folder}/final")
        if world is not None and world.rank:
            return Run(trainer.state.log_history, {}, counts.events)
        kept = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/final")
        return Run(trainer.state.log_history, kept.state_dict(), counts.events)


def timeless(log: list[dict[str, float]]) -> list[dict[str, float]]:
    """A log without times."""
    return [
        {key: value for key, value in line.items() if not any(word in key for word in TIMES)}
        for line in log
    ]
