"""PyTorch's own data parallelism and activation checkpointing as contenders."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.contenders.contender import (
    Contender,
    Loop,
    Setup,
    TierBytes,
    adamw,
    plain_loop,
)


def ddp(model: nn.Module, setup: Setup) -> Loop:
    """DistributedDataParallel: all-reduces in buckets of 25 MiB during backward (2006.15704)."""
    wrapped = DistributedDataParallel(model)
    return plain_loop(wrapped, adamw(wrapped.parameters()), setup)


def fsdp2(reshard: bool, offload: bool = False) -> Callable[[nn.Module, Setup], Loop]:
    """fully_shard, one unit per block; `reshard` frees a unit between forward and backward.

    `offload`: parameters, gradients and optimizer states rest in host memory.
    """

    def build(model: nn.Module, setup: Setup) -> Loop:
        """The model with every block, and then itself, sharded in place."""
        mesh = init_device_mesh(setup.device.type, (setup.ranks,))
        pinned = setup.device.type != "cpu"
        policy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
        options = {"mesh": mesh, "reshard_after_forward": reshard, "offload_policy": policy}
        for module in model.modules():
            if isinstance(module, setup.block):
                fully_shard(module, **options)
        fully_shard(model, **options)
        optimizer = adamw(model.parameters())
        loop = plain_loop(model, optimizer, setup)
        return replace(loop, tiers=lambda: resting(model, optimizer)) if offload else loop

    return build


def resting(model: nn.Module, optimizer: torch.optim.Optimizer) -> TierBytes:
    """Parameters and optimizer states, which rest in host memory; on CPUs nothing is copied."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    every: list[Any] = [*model.parameters(), *states]
    return TierBytes(sum(_local(x).nbytes for x in every if isinstance(x, torch.Tensor)))


def _local(x: Any) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def accelerated(model: nn.Module, setup: Setup) -> Loop:
    """Accelerate's loop, which wraps in DistributedDataParallel."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=setup.device.type == "cpu")
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    return plain_loop(model, optimizer, setup, accelerator.backward)


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


DDP = Contender("torch DDP", "ddp", ddp)
PEERS = (
    DDP,
    Contender("FSDP2 without reshard", "zero2", fsdp2(reshard=False)),
    Contender("FSDP2", "zero3", fsdp2(reshard=True)),
)
ACCELERATE = Contender("accelerate", "ddp", accelerated, package="accelerate")
OFFLOAD = Contender(
    "FSDP2 CPUOffloadPolicy",
    "zero3",
    fsdp2(reshard=True, offload=True),
    note="its parameters rest in host memory too; on CPUs it copies nothing",
    against="zero3",
)
MEMORY = (
    Contender("torch DDP checkpoint", "ddp", ddp_by_hand),
    Contender("FSDP2 checkpoint", "zero3", fsdp2_checkpointed),
)
