"""The model of a run: a GPT of the configured sizes, what it is trained on, what it costs."""

import difflib
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.world import World
from shardwise.core.errors import bad
from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.engine.recipe import AdamW
from shardwise.models import gpt
from shardwise.models.gpt import GPT, SIZES, GPTConfig
from shardwise.models.initial import initial
from shardwise.train.config import ModelSection
from shardwise.train.data import Rows, padded
from shardwise.train.prepare import Prepared

Batch = dict[str, Tensor]


def gpt_config(section: ModelSection, vocabulary: int) -> GPTConfig:
    """The sizes: the named ones, the tokens' own vocabulary, and over them what is given."""
    if section.name not in SIZES:
        close = difflib.get_close_matches(section.name, SIZES, n=1, cutoff=0.0)
        raise bad(f"model.name = '{section.name}'", ", ".join(SIZES), f"model.name = '{close[0]}'")
    given: dict[str, Any] = {"vocabulary": vocabulary, **section.sizes()}
    if "heads" in given and "kv_heads" not in given:
        given["kv_heads"] = given["heads"]
    return replace(SIZES[section.name], **given)


def parameter_count(sizes: GPTConfig) -> int:
    """How many numbers the model learns; a shared weight counts once."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(sizes).parameters())


def build(prepared: Prepared, world: World) -> Engine:
    """The engine: a GPT whose weights depend on the seed alone, made unit by unit on its ranks."""
    train = prepared.config.train
    with torch.device("meta"):
        model = GPT(prepared.sizes)
    return parallelize(
        model,
        prepared.plan,
        world,
        optimizer=AdamW(lr=train.lr, betas=train.betas, weight_decay=train.weight_decay),
        loss=gpt.loss,  # of a part without targets no number; the engine lets it count for nothing
        tokens=gpt.tokens,
        # an infinite bound clips nothing, and still gives the norm, which shows a bad gradient
        # before it becomes a bad weight
        clip=train.clip or float("inf"),
        fill=partial(initial, seed=train.seed),
    )


def batch(rows: Rows, parts: int, device: torch.device) -> Batch:
    """The rows as tensors on the device; at least one row for each of `parts` microbatches."""
    filled = padded(rows, parts)
    return {
        "inputs": torch.from_numpy(filled.inputs).to(device),
        "targets": torch.from_numpy(filled.targets).to(device),
    }
