"""PyTorch's own tensor parallelism, with torchtitan's plan for llama, and context parallelism.

The plan is that of December 2024, torchtitan/parallelisms/parallelize_llama.py. Without sequence
parallelism it is the same with a replicated stream:

                 without                             with SequenceParallel
    embed        rows of the vocabulary, summed      rows of the vocabulary, reduce-scattered
    norms        plain modules                       on shards of the sequence
    attn, mlp    input replicated, once for all      input gathered, once for all the linears
    q k v gate up    columns                         columns
    out down         rows, summed                    rows, reduce-scattered
    head         columns; the logits stay sharded for loss_parallel's cross-entropy

PyTorch's `context_parallel` has kernels for GPUs alone. So in its place stands DDP over the
positions: each rank has a block of every sequence, and attention gathers the keys and values of all
ranks, as llama 3 was trained (arXiv 2407.21783, section 3.3.2), and masks what is later.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from benchmarks.contenders.contender import Batch, Contender, Loop, Setup, adamw

NORMS = ("norm", "blocks.*.attn_norm", "blocks.*.mlp_norm")


def table(sequence: bool, shard_logits: bool) -> dict[str, Any]:
    """Module name pattern -> style; `sequence` keeps the residual stream in shards [B, T/n, D]."""
    stream, whole = (Shard(1) if sequence else Replicate()), Replicate()
    styles: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=stream),
        # one DTensor for q, k, v, so that their input gradients are added before the all-reduce
        "blocks.*.attn": PrepareModuleInput(
            input_layouts=(stream, None, None), desired_input_layouts=(whole, None, None)
        ),
        "blocks.*.mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,)),
        "head": ColwiseParallel(
            input_layouts=stream,
            output_layouts=Shard(-1) if shard_logits else whole,
            use_local_output=not shard_logits,
        ),
    }
    for name in ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up"):
        styles[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("attn.out", "mlp.down"):
        styles[f"blocks.*.{name}"] = RowwiseParallel(output_layouts=stream)
    return styles | {name: SequenceParallel() for name in NORMS if sequence}


def tensor_parallel(
    sequence: bool = False, shard_logits: bool = True
) -> Callable[[nn.Module, Setup], Loop]:
    """`parallelize_module` with that table; without `shard_logits` the logits are gathered."""

    def build(model: nn.Module, setup: Setup) -> Loop:
        """The model with its weights as DTensors on a mesh of all ranks."""
        mesh = init_device_mesh(setup.device.type, (setup.ranks,))
        parallelize_module(model, mesh, table(sequence, shard_logits))
        optimizer = adamw(_by_kind(model))
        parallel_loss = loss_parallel if shard_logits else nullcontext

        def step(batch: Batch) -> float:
            """One step on the whole batch; the loss is a DTensor if the logits are."""
            with parallel_loss():  # the backward pass must be inside too
                loss = setup.loss(model, batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return Loop(step)

    return build


def _by_kind(model: nn.Module) -> list[dict[str, Any]]:
    """A group of DTensors and one of plain tensors: the fused update accepts no mixture."""
    groups: list[list[nn.Parameter]] = [[], []]
    for p in model.parameters():
        groups[isinstance(p, DTensor)].append(p)
    return [{"params": group} for group in groups if group]


PEERS = (
    Contender("torch TP", "tp", tensor_parallel(), whole_batch=True),
    Contender("torch TP + SP", "tp sp", tensor_parallel(sequence=True), whole_batch=True),
    Contender(
        "torch TP without loss parallelism",
        "tp",
        tensor_parallel(shard_logits=False),
        whole_batch=True,
    ),
)


# --- context parallelism ------------------------------------------------------------------------


class _Gathered(TorchFunctionMode):
    """Attention of a block of positions to all, and the numbers of these positions."""

    def __init__(self, rank: int, ranks: int, length: int) -> None:
        super().__init__()
        own = length // ranks
        self.own, self.first = own, rank * own
        past = torch.ones(length, length, dtype=torch.bool).tril()
        self.mask = past[self.first : self.first + own]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange and args == (self.own,):
            return torch.arange(self.first, self.first + self.own, **kwargs)
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args
        key, value = (_whole(x) for x in (key, value))
        grouped = kwargs.get("enable_gqa", False)
        return func(query, key, value, self.mask, enable_gqa=grouped)


def _whole(x: Tensor) -> Tensor:
    group = torch.distributed.group.WORLD
    assert group is not None
    return all_gather_tensor_autograd(x.contiguous(), 2, group)


def gathered(model: nn.Module, setup: Setup) -> Loop:
    """DDP, whose ranks have the same rows and a block of positions each."""
    wrapped = DistributedDataParallel(model)
    optimizer = adamw(wrapped.parameters())
    rank = torch.distributed.get_rank()

    def step(batch: Batch) -> float:
        """One step on this rank's positions of the whole batch."""
        own = {name: x.chunk(setup.ranks, 1)[rank] for name, x in batch.items()}
        with _Gathered(rank, setup.ranks, batch["inputs"].shape[1]):
            loss = setup.loss(wrapped, own)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / setup.ranks
        torch.distributed.all_reduce(mean)
        return mean.item()

    return Loop(step)


CONTEXT = (Contender("gathered keys and values", "cp", gathered, whole_batch=True),)
