"""A decoder by its sizes: those of a GPT, or of a GPT whose feed-forward layers are experts."""

from dataclasses import asdict
from typing import Any

from torch import Tensor

from shardwise.models import gpt, moe
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.moe import MoEConfig, MoEGPT
from shardwise.models.trainable import Loss

Sizes = GPTConfig | MoEConfig


def build(sizes: Sizes) -> GPT | MoEGPT:
    """The model on the current default device."""
    return GPT(sizes) if isinstance(sizes, GPTConfig) else MoEGPT(sizes)


def loss_of(sizes: Sizes) -> Loss:
    """Its loss: cross-entropy, and in training the auxiliary losses."""
    return gpt.loss if isinstance(sizes, GPTConfig) else moe.loss


def logits(made: Any) -> Tensor:
    """The logits in the model's output."""
    return made.logits if isinstance(made, moe.Output) else made


def parameters(sizes: Sizes) -> int:
    """The number of parameters; a shared one counts once."""
    return gpt.parameters(sizes) if isinstance(sizes, GPTConfig) else moe.parameters(sizes)


def flops_per_token(sizes: Sizes) -> int:
    """Floating-point operations of forward and backward for one token."""
    if isinstance(sizes, GPTConfig):
        return gpt.flops_per_token(sizes)
    return moe.flops_per_token(sizes)


def numbers(sizes: Sizes) -> dict[str, Any]:
    """The sizes by the keys of the configuration's section [model]."""
    if isinstance(sizes, GPTConfig):
        return asdict(sizes)
    gate = sizes.gate
    own = {"experts": gate.experts, "experts_per_token": gate.k, "gate": gate.name}
    return asdict(sizes.gpt) | own | {"capacity": gate.capacity, "shared_experts": sizes.shared}
