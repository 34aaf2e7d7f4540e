"""Attention under context parallelism: Ulysses on one axis times a ring on another.

    cp4            ring of 4
    cp4:ulysses    Ulysses on 4
    cp4:2x2        Ulysses on 2 ranks inside a host, a ring of 2 across (the outer axis)

(The combination: Fang and Zhao, "USP", arXiv 2405.07719.) In Ulysses an all-to-all gives each rank
whole sequences of some heads, and another one goes back:

    q, k, v (B, H, T/n, D)  --all-to-all-->  (B, H/n, T, D)  -->  attention
    out     (B, H, T/n, D)  <--all-to-all--  (B, H/n, T, D)  <--

(Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509, section 3.) If there are fewer key heads than
ranks, each is repeated until every rank has one.

In ring attention keys and values travel round a ring of ranks, which keep their queries:

    n = 4     step 0        step 1        step 2        step 3
    rank 0    block 0 ->    block 3 ->    block 2 ->    block 1
    rank 1    block 1 ->    block 0 ->    block 3 ->    block 2        -> to the next rank, while
    rank 2    block 2 ->    block 1 ->    block 0 ->    block 3           the block is computed
    rank 3    block 3 ->    block 2 ->    block 1 ->    block 0

(Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv
2310.01889, section 3; the chunks of causal attention are in positions.py.) The backward sends keys
and values round once more. The gradients of block b begin on rank b + 1, follow the block, and end
on rank b, which adds its own contribution.

The bytes of both are in docs/explanation/context.md.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.comm.move import all_to_all, begin_receive, begin_send, join
from shardwise.comm.torch_links import once
from shardwise.comm.transport import Pending
from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.layouts.uneven import Cut
from shardwise.techniques.context import block
from shardwise.techniques.context.positions import SequenceCut, visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    ring_axis: Axis,
    ulysses_axis: Axis,
    cut: SequenceCut,
) -> Tensor:
    """Attention of this rank's positions to the whole sequence, (B, H, t, D).

    q (B, H, t, D), k and v (B, Hkv, t, D): the t positions of this rank in `cut`, whose rank on cp
    is `ring_axis.rank * ulysses_axis.size + ulysses_axis.rank`. `mask` broadcasts to (B, H, t, T),
    with the rows of this rank and all columns in the order of the sequence: boolean (True: attend)
    or added to the scores; together with `causal` both apply. `scale`: default 1 / sqrt(D).

    Raises InputError for dropout, a mask that requires a gradient, or heads that Ulysses cannot
    divide.
    """
    ranks, inside = cut.ranks, ulysses_axis.size
    if dropout_p > 0:
        given = f"attention dropout of {dropout_p} under cp{ranks}"
        raise bad(given, "0, because ranks would draw different masks for one row", "dropout_p=0.0")
    if mask is not None and mask.requires_grad:
        given = f"an attention mask that requires a gradient, under cp{ranks}"
        raise bad(given, "a mask without a gradient", "mask.detach()")
    require_heads(q.shape[1], k.shape[1], inside, f"cp{ranks}")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    if ring_axis.size == 1:
        inner = partial(_local, causal=causal, scale=scale)
    else:
        inner = partial(ring_attention, ring=Ring(ring_axis, cut.ring, causal, scale))
    return ulysses_attention(q, k, v, mask, ulysses_axis, cut.blocks(ring_axis.rank), inner)


def _local(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    if mask is not None and causal:  # PyTorch accepts one of them
        rows = q.shape[2]
        past = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril_()
        mask = mask & past if mask.dtype == torch.bool else mask.masked_fill(~past, -math.inf)
        causal = False
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


# --- Ulysses ------------------------------------------------------------------------------------

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    axis: Axis,
    counts: Sequence[int],
    inner: Attention,
) -> Tensor:
    """`inner` attention on the positions of all ranks of `axis` and this rank's heads.

    q (B, H, t, D), k and v (B, Hkv, t, D), where `counts[r]` is t on rank r. `mask` broadcasts to
    (B, H, t, columns): `inner` gets all ranks' rows. Heads must pass `require_heads`.
    """
    n = axis.size
    if n == 1:
        return inner(q, k, v, mask)
    if k.shape[1] < n:
        repeats = n // k.shape[1]
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    sizes = [x.shape[1] // n for x in (q, k, v)]
    grouped = [x.unflatten(1, (n, -1)) for x in (q, k, v)]
    q, k, v = _to_heads(torch.cat(grouped, 2).flatten(1, 2), axis, counts).split(sizes, 1)
    out = inner(q, k, v, None if mask is None else _rows(mask, axis, counts))
    return _to_positions(out, axis, counts)


def require_heads(heads: int, key_heads: int, ranks: int, word: str) -> None:
    """Raise InputError for heads that `ranks` cannot divide; `word`: of a ring."""
    if heads % ranks == 0 and (key_heads % ranks == 0 or ranks % key_heads == 0):
        return
    raise bad(
        f"Ulysses attention of {heads} heads and {key_heads} key heads on {ranks} ranks",
        f"heads that are a multiple of {ranks}, and key heads that are a multiple or a divisor",
        f"{word}, ring attention, which divides no heads, in place of {word}:ulysses",
    )


def _to_heads(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    """(B, n * h, t, D), the heads of all ranks -> (B, h, sum of counts, D)."""
    n, t = axis.size, x.shape[2]
    rows = x.unflatten(1, (n, -1)).permute(1, 3, 2, 0, 4).flatten(0, 1)  # (n * t, h, B, D)
    return all_to_all(rows, axis, counts, [t] * n).permute(2, 1, 0, 3)


def _to_positions(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    n, t = axis.size, counts[axis.rank]
    rows = all_to_all(x.permute(2, 1, 0, 3), axis, [t] * n, counts)
    return rows.unflatten(0, (n, t)).permute(3, 0, 2, 1, 4).flatten(1, 2)


def _rows(mask: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    """The rows of all ranks, for this rank's heads. A mask that broadcasts rows is not sent."""
    heads, rows = mask.shape[1:3]
    if rows == sum(counts) and min(counts) > 0:
        return mask
    if rows == 1 and min(counts) > 1:  # a rank with one position cannot tell, and all do the same
        return mask if heads == 1 else mask.chunk(axis.size, 1)[axis.rank]
    mask = mask.expand(-1, -1, counts[axis.rank], -1)
    sent = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
    if heads > 1:
        return _to_heads(sent, axis, counts).to(mask.dtype)
    ranges = tuple(((stop - t, stop),) for t, stop in zip(counts, accumulate(counts), strict=True))
    return join(sent, axis, Cut(2, sum(counts), ranges)).to(mask.dtype)


# --- the ring -------------------------------------------------------------------------------------


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
    keys are sent without being repeated. `mask` [B, H, t, T], or 1 for any of these: rows of this
    rank, and all columns in the order of the sequence; it is boolean (True: attend) or added to the
    scores. A row that attends to no key gives zeros.
    """
    if mask is not None:
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
            found: tuple[slice, list[Tensor]] | None = None
            if part := ring.part(q, mask, source):
                rows, keys, allowed, causal = part
                sliced = q[:, :, rows], kv[0][:, :, keys], kv[1][:, :, keys]
                merged = out[:, :, rows], lse[:, :, rows]
                how = {"causal": causal, "scale": ring.scale}
                dq_, *dkv_ = block.backward(grad[:, :, rows], sliced, allowed, *merged, **how)
                dq[:, :, rows] += dq_
                found = keys, dkv_
            dkv = torch.zeros_like(kv, dtype=dtype) if arriving is None else arriving.wait()
            if found is not None:
                dkv[:, :, :, found[0]] += torch.stack(found[1])
            if source == ring.axis.rank:
                own = dkv
            else:
                arriving = ring.begin_pass(dkv, source)
        if arriving is not None:
            own += arriving.wait()
        dk, dv = own.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None
