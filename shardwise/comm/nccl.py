"""The NCCL transport: the library's own collectives, which overlap with computation.

NCCL's stream runs each call after the work that the current stream has so far; `wait` makes the
current stream wait for it, not the CPU.  No call blocks.  The library's messages are not visible,
so each collective counts by its definition (ledger.py).
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwise.comm.transport import Pending, Transport

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

#: torch 2.13 renamed these; 2.11 has only the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Nccl(Transport):
    """One process group of NCCL."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def all_reduce(self, x: Tensor, op: str = "sum") -> Pending[Any]:
        self.count("all_reduce", x)
        return pending(dist.all_reduce(x, OPS[op], self.group, async_op=True))

    def broadcast(self, x: Tensor, root: int) -> Pending[Any]:
        self.count("broadcast", x, root=root)
        return pending(dist.broadcast(x, group=self.group, async_op=True, group_src=root))

    def all_gather(self, out: Tensor, x: Tensor) -> Pending[Any]:
        self.count("all_gather", x, out)
        return pending(_all_gather(out, x, group=self.group, async_op=True))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending[Any]:
        self.count("reduce_scatter", x, out)
        return pending(_reduce_scatter(out, x, group=self.group, async_op=True))

    def all_to_all(
        self, out: Tensor, x: Tensor, out_counts: Sequence[int], in_counts: Sequence[int]
    ) -> Pending[Any]:
        self.count("all_to_all", x, out, counts=in_counts)
        counts = list(out_counts), list(in_counts)
        return pending(dist.all_to_all_single(out, x, *counts, group=self.group, async_op=True))

    def send(self, x: Tensor, to: int) -> Pending[Any]:
        self.begin("send", x).add(x, x.numel())
        return pending(dist.isend(x, group=self.group, group_dst=to))

    def receive(self, x: Tensor, source: int) -> Pending[Any]:
        self.require_device("receive", x)
        return pending(dist.irecv(x, group=self.group, group_src=source))

    def barrier(self) -> None:
        dist.barrier(self.group)


def pending(work: Any) -> Pending[Any]:
    return Pending([work.wait])
