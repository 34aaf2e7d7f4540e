"""Attention under context parallelism: Ulysses on one axis times a ring on another.

    cp4            ring of 4
    cp4:ulysses    Ulysses on 4
    cp4:2x2        Ulysses on 2 ranks inside a host, a ring of 2 across (the outer axis)

Either axis may have one rank; with one rank on both this is PyTorch's attention. (The combination:
Fang and Zhao, "USP", arXiv 2405.07719.) In Ulysses an all-to-all gives each rank whole sequences of
some heads, and another one goes back:

    q, k, v (B, H, T/n, D)  --all-to-all-->  (B, H/n, T, D)  -->  attention
    out     (B, H, T/n, D)  <--all-to-all--  (B, H/n, T, D)  <--

(Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509, section 3.) Any attention may run in the
middle: that of one device, or a ring over another axis. If there are fewer key heads than ranks,
each is repeated until every rank has one.

With K = H + 2 max(Hkv, n) heads, a rank with t of T positions sends these elements:

    forward     queries, keys, values    B D K t (n-1)/n        in one all-to-all
                output                   B D H (T - t)/n
    backward    gradient of the output   B D H t (n-1)/n
                of queries, keys, ...    B D K (T - t)/n

The rows of a mask are sent in the forward pass alone, a boolean in one byte, unless it has those of
all ranks.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.comm.move import all_to_all, join
from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.layouts.uneven import Cut
from shardwise.techniques.context.positions import SequenceCut
from shardwise.techniques.context.ring import Ring, ring_attention


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


def has_all_rows(mask: Tensor, counts: Sequence[int]) -> bool:
    return mask.shape[2] == sum(counts) and min(counts) > 0


def sends_rows(mask: Tensor, counts: Sequence[int]) -> bool:
    """Whether the rows of a mask with 4 dims are sent, unless they are equal, or those of all."""
    # ranks with one position cannot tell, and all ranks must do the same
    return not has_all_rows(mask, counts) and (mask.shape[2] > 1 or min(counts) <= 1)


def _rows(mask: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    """The rows of all ranks, for this rank's heads. A mask that broadcasts rows is not sent."""
    heads = mask.shape[1]
    if has_all_rows(mask, counts):
        return mask
    if not sends_rows(mask, counts):
        return mask if heads == 1 else mask.chunk(axis.size, 1)[axis.rank]
    mask = mask.expand(-1, -1, counts[axis.rank], -1)
    sent = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
    if heads > 1:
        return _to_heads(sent, axis, counts).to(mask.dtype)
    ranges = tuple(((stop - t, stop),) for t, stop in zip(counts, accumulate(counts), strict=True))
    return join(sent, axis, Cut(2, sum(counts), ranges)).to(mask.dtype)
