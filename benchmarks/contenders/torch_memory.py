"""PyTorch's activation checkpointing as contenders: by hand under DDP, by wrapper under FSDP2."""

from functools import partial

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from benchmarks.contenders.contender import Contender, Loop, Setup
from benchmarks.contenders.torch_peers import ddp, fsdp2


def ddp_by_hand(model: nn.Module, setup: Setup) -> Loop:
    """DDP of a model whose blocks call torch.utils.checkpoint around their own forward."""
    for module in model.modules():
        if isinstance(module, setup.block):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    return ddp(model, setup)


def fsdp2_checkpointed(model: nn.Module, setup: Setup) -> Loop:
    """fully_shard of a model whose blocks are in torch's checkpoint wrapper, as torchtitan does."""
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=checkpoint_wrapper,
        check_fn=lambda module: isinstance(module, setup.block),
    )
    return fsdp2(reshard=True)(model, setup)


PEERS = (
    Contender("torch DDP checkpoint", "ddp", ddp_by_hand),
    Contender("FSDP2 checkpoint", "zero3", fsdp2_checkpointed),
)
