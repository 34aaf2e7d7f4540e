"""Attention under context parallelism: Ulysses on one axis times a ring on another.

    cp4            ring of 4
    cp4:ulysses    Ulysses on 4
    cp4:2x2        Ulysses on 2 ranks inside a host, a ring of 2 across (the outer axis)

Either axis may have one rank; with one rank on both this is PyTorch's attention.  The combination
is that of Fang and Zhao, "USP", arXiv 2405.07719.
"""

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.techniques.context.positions import SequenceCut
from shardwise.techniques.context.ring import Ring, ring_attention
from shardwise.techniques.context.ulysses import require_heads, ulysses_attention


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
    is `ring_axis.rank * ulysses_axis.size + ulysses_axis.rank`.  `mask` broadcasts to (B, H, t, T),
    with the rows of this rank and all columns in the order of the sequence: boolean (True: attend)
    or added to the scores; together with `causal` both apply.  `scale`: default 1 / sqrt(D).

    Raises:
        InputError: dropout, a mask that requires a gradient, or heads that Ulysses cannot divide.
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
