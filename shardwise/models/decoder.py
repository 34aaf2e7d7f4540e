"""A decoder by its sizes: a GPT, a GPT of experts, a folder of transformers, a user's model."""

from dataclasses import asdict
from functools import partial
from typing import Any

from torch import nn

from shardwise.models import gpt, hf, moe, pretrained, user
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.moe import MoEConfig, MoEGPT
from shardwise.models.pretrained import FolderConfig
from shardwise.models.trainable import Loss, initial
from shardwise.models.user import UserConfig
from shardwise.techniques.data.flat.flat_parameter import Fill

Sizes = GPTConfig | MoEConfig | FolderConfig | UserConfig


def build(sizes: Sizes) -> nn.Module:
    """The model on the current default device; a user's is always on the CPU."""
    if isinstance(sizes, FolderConfig):
        return pretrained.build(sizes)
    if isinstance(sizes, UserConfig):
        return user.build(sizes)
    return GPT(sizes) if isinstance(sizes, GPTConfig) else MoEGPT(sizes)


def fill(sizes: Sizes, seed: int) -> Fill | None:
    """Writes a parameter's first value: the folder's, or by seed and name; None for user models."""
    if isinstance(sizes, FolderConfig):
        return pretrained.fill(sizes)
    if isinstance(sizes, UserConfig):
        return None
    return partial(initial, seed=seed)


def loss_of(sizes: Sizes) -> Loss:
    """Its loss: cross-entropy, and in training the auxiliary losses of our own experts."""
    if isinstance(sizes, FolderConfig):
        return hf.causal_loss
    if isinstance(sizes, UserConfig):
        return user.loss_of(sizes)
    return gpt.loss if isinstance(sizes, GPTConfig) else moe.loss


def parameters(sizes: Sizes) -> int:
    if isinstance(sizes, FolderConfig | UserConfig):
        return sizes.parameters
    return gpt.parameters(sizes) if isinstance(sizes, GPTConfig) else moe.parameters(sizes)


def flops_per_token(sizes: Sizes) -> int:
    """Floating-point operations of forward and backward for one token."""
    if isinstance(sizes, FolderConfig):
        return pretrained.flops_per_token(sizes)
    if isinstance(sizes, UserConfig):
        return user.flops_per_token(sizes)
    if isinstance(sizes, GPTConfig):
        return gpt.flops_per_token(sizes)
    return moe.flops_per_token(sizes)


def numbers(sizes: Sizes) -> dict[str, Any]:
    """The sizes by the keys of the configuration's section [model]."""
    if isinstance(sizes, FolderConfig | UserConfig):
        # the path may be another when a run is resumed
        hidden = ("path", "multiplied", "name", "seed")
        return {k: v for k, v in asdict(sizes).items() if k not in hidden}
    if isinstance(sizes, GPTConfig):
        return asdict(sizes)
    gate = sizes.gate
    own = {"experts": gate.experts, "experts_per_token": gate.k, "gate": gate.name}
    return asdict(sizes.gpt) | own | {"capacity": gate.capacity, "shared_experts": sizes.shared}
