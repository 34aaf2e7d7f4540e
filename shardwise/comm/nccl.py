"""this file is the NCCL transport: the library's own collectives, queued beside the computation.

Each call is put on NCCL's stream after what the current stream has done so far; `wait` makes the
current stream wait for it, not the processor.  Nothing here blocks.  What the library sends is out
of sight, so each collective counts by its definition (volume.py).
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwise.comm import volume
from shardwise.comm.gloo import OPS
from shardwise.comm.transport import Pending, Transport

#: torch 2.13 renamed these; 2.11 has only the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Nccl(Transport):
    """One process group of NCCL."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Pending:
        self.begin("all_reduce").collective(x, volume.all_reduce(x.numel(), self.size))
        return _pending(dist.all_reduce(x, OPS[op], self.group, async_op=True))

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> Pending:
        self.begin("reduce").collective(x, volume.reduce(x.numel(), self.rank == root))
        return _pending(dist.reduce(x, self._global(root), OPS[op], self.group, async_op=True))

    def broadcast(self, x: Tensor, root: int) -> Pending:
        sent = volume.broadcast(x.numel(), self.size, self.rank == root)
        self.begin("broadcast").collective(x, sent)
        return _pending(dist.broadcast(x, self._global(root), self.group, async_op=True))

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        self.begin("all_gather").collective(x, volume.all_gather(x.numel(), self.size))
        return _pending(_all_gather(out, x, group=self.group, async_op=True))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        self.begin("reduce_scatter").collective(x, volume.reduce_scatter(out.numel(), self.size))
        return _pending(_reduce_scatter(out, x, group=self.group, async_op=True))

    def all_to_all(
        self, out: Tensor, x: Tensor, out_counts: Sequence[int], in_counts: Sequence[int]
    ) -> Pending:
        self.begin("all_to_all").collective(x, volume.all_to_all(in_counts, self.rank))
        counts = list(out_counts), list(in_counts)
        return _pending(dist.all_to_all_single(out, x, *counts, group=self.group, async_op=True))

    def send(self, x: Tensor, to: int) -> Pending:
        self.begin("send").message(x)
        return _pending(dist.isend(x, self._global(to), self.group))

    def receive(self, x: Tensor, source: int) -> Pending:
        return _pending(dist.irecv(x, self._global(source), self.group))

    def barrier(self) -> None:
        dist.barrier(self.group)


def _pending(work: Any) -> Pending:
    return Pending([work.wait])
