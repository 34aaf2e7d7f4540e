"""Context parallelism without a library: DDP over the positions, and a gather of keys and values.

Each rank has a block of every sequence. Attention gathers the keys and values of all ranks, as
llama 3 was trained (arXiv 2407.21783, section 3.3.2), and masks what is later. PyTorch's own
`context_parallel` has kernels for GPUs alone.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from benchmarks.contenders.contender import Batch, Contender, Loop, Setup, adamw


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


PEERS = (Contender("gathered keys and values", "cp", gathered, whole_batch=True),)
