"""A MoE GPT whose sizes divide by nothing convenient, under any gate, and its batches."""

from functools import partial

import torch
from torch import Tensor, nn

from shardwise.models import gpt, moe
from shardwise.models.trainable import fill
from shardwise.techniques.expert.gate import FIXED, GATES, Gate
from tests.engine.cases import CONFIG, Task, text

LOSSES = {"balance": 0.3, "importance": 0.2, "z": 0.1}


def model(
    name: str, capacity: float | None = None, experts: int = 4, losses: bool = True
) -> nn.Module:
    used = LOSSES if losses and name not in FIXED else {}
    gate = Gate(name, experts, GATES[name] or 2, capacity, scale=1.5, losses=used)
    made = moe.MoEGPT(moe.MoEConfig(CONFIG, gate, shared=1))
    fill(made, seed=3)
    with torch.no_grad():
        for key, value in made.named_parameters():
            if "router" in key:  # so that some experts are asked for too often
                value.mul_(3.0)
    return made


def batch(name: str, rows: int, step: int) -> dict[str, Tensor]:
    """The same words and random numbers in every run; the expert of each token where it is read."""
    torch.manual_seed(step)
    made = text(step, rows)
    if name == "assigned":
        made["experts"] = made["inputs"] * 7 % 4
    return made


def task(name: str, capacity: float | None = None, rows: int = 7, losses: bool = True) -> Task:
    make = partial(model, name, capacity, losses=losses)
    return Task(make, partial(batch, name, rows), moe.loss, gpt.tokens)
