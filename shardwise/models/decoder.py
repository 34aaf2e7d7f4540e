"""A decoder by its sizes: a GPT, a GPT of experts, or a model in a folder of transformers."""

from dataclasses import asdict
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwise.models import gpt, hf, moe, pretrained
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.initial import initial
from shardwise.models.moe import MoEConfig, MoEGPT
from shardwise.models.pretrained import FolderConfig
from shardwise.models.trainable import Loss
from shardwise.parallel.data.initial_weights import Fill

Sizes = GPTConfig | MoEConfig | FolderConfig


def build(sizes: Sizes) -> nn.Module:
    """The model on the current default device."""
    if isinstance(sizes, FolderConfig):
        return pretrained.build(sizes)
    return GPT(sizes) if isinstance(sizes, GPTConfig) else MoEGPT(sizes)


def fill(sizes: Sizes, seed: int) -> Fill:
    """Writes a parameter's first value: the folder's, or one that depends on seed and name."""
    if isinstance(sizes, FolderConfig):
        return pretrained.fill(sizes)
    return partial(initial, seed=seed)


def loss_of(sizes: Sizes) -> Loss:
    """Its loss: cross-entropy, and in training the auxiliary losses of our own experts."""
    if isinstance(sizes, FolderConfig):
        return hf.causal_loss
    return gpt.loss if isinstance(sizes, GPTConfig) else moe.loss


def logits(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """The logits [B, T, V] in the model's output."""
    with hf.Wide():
        made = model(tokens_BT)
    return made if isinstance(made, Tensor) else made.logits


def parameters(sizes: Sizes) -> int:
    """The number of parameters; a shared one counts once."""
    if isinstance(sizes, FolderConfig):
        return sizes.parameters
    return gpt.parameters(sizes) if isinstance(sizes, GPTConfig) else moe.parameters(sizes)


def flops_per_token(sizes: Sizes) -> int:
    """Floating-point operations of forward and backward for one token."""
    if isinstance(sizes, FolderConfig):
        return pretrained.flops_per_token(sizes)
    if isinstance(sizes, GPTConfig):
        return gpt.flops_per_token(sizes)
    return moe.flops_per_token(sizes)


def numbers(sizes: Sizes) -> dict[str, Any]:
    """The sizes by the keys of the configuration's section [model]."""
    if isinstance(sizes, FolderConfig):  # the path may be another when a run is resumed
        return {k: v for k, v in asdict(sizes).items() if k not in ("path", "multiplied")}
    if isinstance(sizes, GPTConfig):
        return asdict(sizes)
    gate = sizes.gate
    own = {"experts": gate.experts, "experts_per_token": gate.k, "gate": gate.name}
    return asdict(sizes.gpt) | own | {"capacity": gate.capacity, "shared_experts": sizes.shared}
