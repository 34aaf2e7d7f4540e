"""Ring attention: keys and values travel round a ring of ranks, which keep their queries.

    n = 4     step 0        step 1        step 2        step 3
    rank 0    block 0 ->    block 3 ->    block 2 ->    block 1
    rank 1    block 1 ->    block 0 ->    block 3 ->    block 2        -> to the next rank, while
    rank 2    block 2 ->    block 1 ->    block 0 ->    block 3           the block is computed
    rank 3    block 3 ->    block 2 ->    block 1 ->    block 0

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv
2310.01889, section 3; the chunks of causal attention are in positions.py. The backward sends keys
and values round once more. The gradients of block b begin on rank b + 1, follow the block, and end
on rank b, which adds its own contribution.

A rank sends, in n - 1 messages each, with t_r positions on rank r of T, and K = 2 B Hkv D elements
of keys and values a position:

    forward     keys, values         K (T - t_(r+1))        all blocks except the one it gets last
    backward    keys, values         K (T - t_(r+1))
                their gradients      K (T - t_r)            in fp32 (fp64 for fp64)

A message with no position is not sent. On CUDA, `open_ways` prepares the pairs (r, r + 1 mod n).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.comm.move import begin_receive, begin_send
from shardwise.comm.torch_links import once
from shardwise.comm.transport import Pending
from shardwise.comm.world import Axis
from shardwise.techniques.context import block
from shardwise.techniques.context.block import Three
from shardwise.techniques.context.positions import SequenceCut, visible


class BlockPart(NamedTuple):
    """The rows of this rank and the keys of a block that attend to each other."""

    rows: slice
    keys: slice
    mask: Tensor | None
    causal: bool


@dataclass(frozen=True)
class Ring:
    """One attention over the ranks of `axis`, which hold the positions of `cut`."""

    axis: Axis
    cut: SequenceCut
    causal: bool
    scale: float

    def blocks(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The keys and values of all ranks with their owner; the next travel meanwhile."""
        rank, n = self.axis.rank, self.axis.size
        for step in range(n - 1):
            passing = self.begin_pass(kv, (rank - step) % n)
            yield (rank - step) % n, kv
            kv = passing.wait()
        yield (rank + 1) % n, kv

    def begin_pass(self, x: Tensor, owner: int) -> Pending[Tensor]:
        """Begin to send `x`, the positions of `owner`, and to receive those of `owner - 1`."""
        rank, n = self.axis.rank, self.axis.size
        positions = self.cut.numel((owner - 1) % n)
        arriving = x.new_empty((*x.shape[:-2], positions, x.shape[-1]))
        pending: list[Pending[Any]] = []
        if x.numel():
            pending.append(begin_send(x, self.axis, (rank + 1) % n))
        if arriving.numel():
            pending.append(begin_receive(arriving, self.axis, (rank - 1) % n))
        return Pending([*(each.wait for each in pending), lambda: arriving])

    def part(self, q: Tensor, mask: Tensor | None, source: int) -> BlockPart | None:
        """What is computed of the block of rank `source`; None if nothing."""
        mine = source == self.axis.rank
        first, stop = 0, self.cut.numel(source)
        if self.causal and not mine:
            first, stop = visible(self.cut, self.axis.rank, source)
        if first == q.shape[2] or stop == 0:
            return None
        rows, keys = slice(first, None), slice(stop)
        if mask is not None:
            chunks = [mask[..., start:end] for start, end in self.cut.chunks(source)]
            mask = torch.cat(chunks, -1)[..., keys]
            mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
        return BlockPart(rows, keys, mask, self.causal and mine)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks. Differentiable in q, k and v.

    q (B, H, t, D), k and v (B, Hkv, t, D), with the t positions of this rank; Hkv divides H, and
    keys are sent without being repeated. `mask` broadcasts to (B, H, t, T): rows of this rank, and
    all columns in the order of the sequence; it is boolean (True: attend) or added to the scores. A
    row that attends to no key gives zeros.
    """
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask.expand(*mask.shape[:3], ring.cut.length)
    return _RingAttention.apply(q, k, v, mask, ring)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring
    ) -> Tensor:
        """Merge the blocks' outputs as they come by."""
        dtype = block.accumulation_dtype(q)
        out = torch.zeros_like(q, dtype=dtype)
        lse = q.new_full(q.shape[:3], -math.inf, dtype=dtype)
        for source, (k_, v_) in ring.blocks(torch.stack([k, v])):
            if part := ring.part(q, mask, source):
                rows, keys, allowed, causal = part
                qkv = q[:, :, rows], k_[:, :, keys], v_[:, :, keys]
                found = block.forward(*qkv, allowed, causal, ring.scale)
                block.merge(out[:, :, rows], lse[:, :, rows], *found)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, lse.masked_fill_(lse == -math.inf, math.inf))
        ctx.ring = ring
        return out

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Add to the gradients of each block as they come by, behind the block."""
        q, k, v, mask, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        dtype = block.accumulation_dtype(q)
        dq = torch.zeros_like(q, dtype=dtype)
        own, arriving = q.new_empty(0), None  # the first block is this rank's own
        for source, kv in ring.blocks(torch.stack([k, v])):
            found = _gradients(ring, source, (q, kv[0], kv[1]), mask, (grad, out, lse))
            dkv = torch.zeros_like(kv, dtype=dtype) if arriving is None else arriving.wait()
            if found is not None:
                (rows, keys, *_), (dq_, dk_, dv_) = found
                dq[:, :, rows] += dq_
                dkv[:, :, :, keys] += torch.stack([dk_, dv_])
            if source == ring.axis.rank:
                own = dkv
            else:
                arriving = ring.begin_pass(dkv, source)
        if arriving is not None:
            own += arriving.wait()
        dk, dv = own.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def _gradients(
    ring: Ring, source: int, qkv: Three, mask: Tensor | None, after: Three
) -> tuple[BlockPart, Three] | None:
    """What the block of rank `source` adds to the gradients; `after`: of out, out, lse."""
    (q, k, v), (grad, out, lse) = qkv, after
    part = ring.part(q, mask, source)
    if part is None:
        return None
    rows, keys, allowed, causal = part
    sliced = q[:, :, rows], k[:, :, keys], v[:, :, keys]
    merged = out[:, :, rows], lse[:, :, rows]
    grad = grad[:, :, rows]
    return part, block.backward(grad, sliced, allowed, *merged, causal=causal, scale=ring.scale)
