"""Attention of some rows to some keys: one block of a larger attention, with its log-sum-exp.

    s = scale q k^T + mask       lse = log sum exp s      out = exp(s - lse) v        forward
    p = exp(s - lse)             d = sum(grad out)        ds = p (grad v^T - d)
    dq = scale ds k              dk = scale ds^T q        dv = p^T grad               backward

Outputs of blocks of one row merge by their lse (`merge`). If `out` and `lse` in the backward are
the merged ones, p is that of the whole row, and the gradients are exactly this block's contribution
(Dao, "FlashAttention-2", arXiv 2307.08691, section 3.1).

Shapes: q, out (B, H, Tq, D), k, v (B, Hkv, Tk, D), lse (B, H, Tq), mask broadcasts to
(B, H, Tq, Tk). Hkv divides H: consecutive heads share keys. No dim is empty. Kernels of PyTorch
compute it where they return lse: on a CPU always, on CUDA in 16 bits without a mask.
"""

import math

import torch
from torch import Tensor

Three = tuple[Tensor, Tensor, Tensor]

_ATEN = torch.ops.aten
#: The widest head of PyTorch's kernel on CUDA, and what the width is a multiple of.
_WIDEST, _GRAIN = 256, 8


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The output of the block, and lse, which is -inf in rows whose mask excludes every key.
    `causal` needs as many rows as keys. `mask` is boolean (True: attend) or added to the scores.
    """
    bias = _bias(mask, q, causal)
    causal = causal and bias is None
    if q.device.type == "cpu":
        fused = _ATEN._scaled_dot_product_flash_attention_for_cpu
        out, lse = fused(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        if bias is not None:  # the kernel returns 0 for such rows
            lse = lse.masked_fill((bias == -math.inf).all(-1), -math.inf)
        return out, lse
    if bias is None and _flash(q):
        return _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    return math_forward(q, k, v, _causal_bias(q) if causal else bias, scale)


def backward(
    grad: Tensor,
    qkv: Three,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> Three:
    """This block's contribution to the gradients of q, k and v. `out` and `lse` are merged over all
    blocks of the row; `lse` is +inf in rows that attend to no key, so that their p is 0.
    """
    q = qkv[0]
    bias = _bias(mask, q, causal)
    causal = causal and bias is None
    if q.device.type == "cpu":
        fused = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        return fused(grad, *qkv, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
    if bias is None and _flash(q):
        # without dropout the kernel reads no seed; it reads lse as if it were contiguous
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        sizes = None, None, q.shape[2], qkv[1].shape[2]
        fused = _ATEN._scaled_dot_product_flash_attention_backward
        rest = 0.0, causal, seed, seed[0]
        return fused(grad, *qkv, out, lse.contiguous(), *sizes, *rest, scale=scale)
    return math_backward(grad, qkv, _causal_bias(q) if causal else bias, out, lse, scale)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block to `out` and `lse` (fp32 or fp64), in place; they begin as 0 and -inf."""
    total = torch.logaddexp(lse, block_lse)
    finite = total.masked_fill(total == -math.inf, 0.0)  # -inf - -inf is NaN
    out.mul_((lse - finite).exp().unsqueeze(-1))
    out.add_(block_out * (block_lse - finite).exp().unsqueeze(-1))
    lse.copy_(total)


def math_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`forward` in plain operations, in fp32 (fp64 for fp64); `bias` is added to the scores."""
    q_, k_, v_ = _grouped(q, k, v)
    scores = _scores(q_, k_, bias, scale)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
    return (p @ v_).flatten(1, 2), lse.flatten(1, 2)


def math_backward(
    grad: Tensor, qkv: Three, bias: Tensor | None, out: Tensor, lse: Tensor, scale: float
) -> Three:
    """`backward` in plain operations, in fp32 (fp64 for fp64)."""
    q, k, v = _grouped(*qkv)
    grad, out = (_split(x, k).to(q.dtype) for x in (grad, out))
    p = (_scores(q, k, bias, scale) - _split(lse, k).unsqueeze(-1)).exp()
    ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    grads = (ds @ k).flatten(1, 2), (ds.mT @ q).sum(2), (p.mT @ grad).sum(2)
    dq, dk, dv = (x.to(qkv[0].dtype) for x in grads)
    return dq, dk, dv


def accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _flash(q: Tensor) -> bool:
    fits = q.shape[-1] <= _WIDEST and q.shape[-1] % _GRAIN == 0
    return fits and q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> Three:
    """Heads by the keys that they share: q (B, Hkv, H / Hkv, Tq, D), k and v (B, Hkv, 1, Tk, D)."""
    dtype = accumulation_dtype(q)
    k_, v_ = k.unsqueeze(2).to(dtype), v.unsqueeze(2).to(dtype)
    return _split(q, k_).to(dtype), k_, v_


def _split(x: Tensor, k: Tensor) -> Tensor:
    return x.unflatten(1, (k.shape[1], -1))


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    if bias is None:
        return scores
    return scores + (bias.unsqueeze(1) if bias.shape[1] == 1 else _split(bias, k))


def _bias(mask: Tensor | None, q: Tensor, causal: bool) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)
    bias = mask.to(q.dtype)
    return bias + _causal_bias(q) if causal else bias


def _causal_bias(q: Tensor) -> Tensor:
    rows = q.shape[2]
    return q.new_full((rows, rows), -math.inf).triu_(1)[None, None]
