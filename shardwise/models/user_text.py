"""A user's model (`file.py:build`) as the model of a run: it is trained on the run's text.

A batch is {"inputs": [rows, positions], "targets": [rows, positions]}, token numbers, with the
target -100 where there is none. The loss is the one that `build` returns with the model; a module
alone returns the logits [rows, positions, vocabulary], and is trained with cross-entropy.
"""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.options import own_loss
from shardwise.models import gpt, user
from shardwise.models.trainable import Loss, Trainable

ROWS = 2  # of the batch that is tried; batch normalisation needs more than one


@dataclass(frozen=True)
class UserConfig:
    """A user's model, and its sizes.

    vocabulary  numbers of tokens: of its logits, or else of the run's text
    sequence    positions of a training sequence
    parameters  a shared one counts once
    multiplied  parameters outside of embeddings
    layers      at least
    """

    name: str
    seed: int
    vocabulary: int
    sequence: int
    parameters: int
    multiplied: int
    layers: int = 1


def read(name: str, sequence: int, vocabulary: int, seed: int) -> UserConfig:
    """The sizes of the model, which is built and tried on a batch of text.

    Raises InputError if the function cannot be called, or its model cannot read the batch.
    """
    found = _found(name, seed)
    model, batch = found.build(), gpt.random_text(ROWS, sequence, vocabulary, seed)
    with torch.no_grad():
        try:
            found.loss(model, batch)
        except Exception as error:
            doing = f"its loss of text [{ROWS}, {sequence}] with numbers below {vocabulary:,}"
            raise user.failed(name, doing, error) from error
        size = _logits_size(model, batch["inputs"])
    multiplied = {
        p: p.numel()
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for p in module.parameters(recurse=False)
    }
    count = sum(p.numel() for p in model.parameters())
    return UserConfig(name, seed, size or vocabulary, sequence, count, sum(multiplied.values()))


def build(config: UserConfig) -> nn.Module:
    """The model with its weights, on the CPU: nobody knows whether it can be made without."""
    with torch.device("cpu"):
        return _found(config.name, config.seed).make()


def loss_of(config: UserConfig) -> Loss:
    """Its loss; a function that other processes can be sent."""
    return partial(_loss, config.name, config.seed)


def flops_per_token(config: UserConfig) -> int:
    """Floating-point operations of forward and backward for one token, without attention's own."""
    return 6 * config.multiplied


@cache
def _found(name: str, seed: int) -> Trainable:
    """The user's model; its own batches are not used."""
    found = user.find(name, seed, make_batch=_no_batch)
    return replace(found, loss=gpt.loss) if found.loss is own_loss else found


def _no_batch(rows: int, seed: int) -> None:
    """No batch: a run has its own."""


def _loss(name: str, seed: int, model: nn.Module, batch: Any) -> Tensor:
    return _found(name, seed).loss(model, batch)


def _logits_size(model: nn.Module, tokens_BT: Tensor) -> int:
    """The vocabulary of the model's logits; 0 for a model that returns something else."""
    for inputs in (tokens_BT[:, :1], tokens_BT):
        try:
            out = model(inputs)
        except Exception:  # noqa: BLE001  a model that needs more than tokens
            return 0
        logits = getattr(out, "logits", out)
        if not isinstance(logits, Tensor) or logits.shape[:-1] != inputs.shape:
            return 0
    return logits.shape[-1]
