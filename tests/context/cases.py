"""Attention over ranks beside that of one process: what tests of context parallelism compare."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.comm.world import Axis, World
from shardwise.core.mesh import Mesh
from shardwise.techniques.context.attention import attention
from shardwise.techniques.context.cut_batch import shard
from shardwise.techniques.context.positions import SequenceCut

BATCH, WIDTH, SCALE = 2, 4, 0.4


class Qkv(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Case:
    """`word` is that of a plan; `mask` a name of `mask_of`."""

    word: str
    length: int = 16
    causal: bool = True
    mask: str = ""
    heads: int = 4
    key_heads: int = 4
    dtype: torch.dtype = torch.float64
    zigzag: bool = True

    @property
    def ranks(self) -> int:
        return int(self.word[2])

    @property
    def ulysses(self) -> int:
        """The ranks of Ulysses."""
        _, _, form = self.word.partition(":")
        return {"": 1, "ulysses": self.ranks, "2x2": 2}[form]

    @property
    def cut(self) -> SequenceCut:
        return SequenceCut(self.length, self.ranks, self.zigzag, self.ulysses)

    def inputs(self) -> tuple[Qkv, Tensor, Tensor | None]:
        """q, k and v of the whole sequence, the gradient of the output, and the mask."""
        own = torch.Generator().manual_seed(self.length)  # ranks may be threads of one process
        heads = self.heads, self.key_heads, self.key_heads, self.heads
        q, k, v, grad = (
            torch.randn(BATCH, n, self.length, WIDTH, dtype=torch.float64, generator=own)
            for n in heads
        )
        return Qkv(*(x.to(self.dtype) for x in (q, k, v))), grad.to(self.dtype), mask_of(self)


def mask_of(case: Case) -> Tensor | None:
    """A mask of the whole sequence; of `padding`, some rows attend to no key."""
    t = case.length
    documents = torch.arange(t) // max(1, t // 3)
    match case.mask:
        case "padding":  # at the front: under a causal mask the first rows see nothing
            lengths = torch.tensor([t - t // 3, t])
            return (torch.arange(t) >= t - lengths[:, None])[:, None, None]
        case "blocks":
            return documents[:, None] == documents
        case "by head":
            own = torch.Generator().manual_seed(t)
            return torch.randn(1, case.heads, t, t, dtype=case.dtype, generator=own)
        case "distance":
            return -(torch.arange(t)[:, None] - torch.arange(t)).abs().to(case.dtype)
        case _:
            return None


def expected(case: Case) -> list[Tensor]:
    """The output and the gradients of q, k and v in one process."""
    qkv, grad, mask = case.inputs()
    allowed = torch.ones(case.length, case.length, dtype=torch.bool)
    allowed = allowed.tril() if case.causal else allowed
    bias = torch.zeros(case.length, case.length, dtype=case.dtype)
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        bias = mask
    bias = bias.masked_fill(~allowed, -torch.inf)
    q, k, v = leaves = [x.requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(q, k, v, bias, scale=SCALE, enable_gqa=True)
    # a row without keys is 0 here as well
    dead = (bias == -torch.inf).all(-1, keepdim=True)
    out = out.masked_fill(dead.expand(BATCH, case.heads, case.length, 1), 0)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def axes(world: World, case: Case) -> tuple[World, Axis, Axis]:
    """The world with the axis cp, and its two parts: that of the ring and that of Ulysses."""
    u, n = case.ulysses, case.ranks
    world = world.on(Mesh.parse(f"dp{n}"))
    inner = world.within("dp", [range(r, r + u) for r in range(0, n, u)], "ulysses")
    outer = world.within("dp", [range(r, n, u) for r in range(u)], "ring")
    return world, outer, inner


def shards(world: World, case: Case) -> tuple[Qkv, Tensor, Tensor | None]:
    """`case.inputs()` of this rank: of the mask its rows.  Strides are those of (B, T, H, D)."""
    qkv, grad, mask = case.inputs()
    q, k, v, grad = (shard(x, case.cut, world.rank, 2) for x in (*qkv, grad))
    if mask is not None and mask.shape[-2] > 1:
        mask = shard(mask, case.cut, world.rank, mask.dim() - 2)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return Qkv(*(x.requires_grad_() for x in (q, k, v))), grad, mask


def run(world: World, case: Case) -> list[Tensor]:
    """The output and the gradients of q, k and v on this rank."""
    world, ring, ulysses = axes(world, case)
    qkv, grad, mask = shards(world, case)
    sizes = {"ring_axis": ring, "ulysses_axis": ulysses, "cut": case.cut}
    out = attention(*qkv, mask, causal=case.causal, scale=SCALE, **sizes)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


def difference(case: Case, found: list[list[Tensor]]) -> float:
    """The largest difference of the outputs and gradients of all ranks to one process."""
    wholes = [unshard(list(parts), case.cut, 2) for parts in zip(*found, strict=True)]
    exact = expected(replace(case, dtype=torch.float64))
    largest = [(x - y).abs().max() for x, y in zip(wholes, exact, strict=True)]
    return torch.stack(largest).max().item()  # NaN if any is


def unshard(shards: Sequence[Tensor], cut: SequenceCut, dim: int) -> Tensor:
    """The inverse of `shard`: the tensor whose shards, in the order of ranks, these are."""
    division = cut.on(dim)
    whole = shards[0].new_empty(division.full_shape(shards[0].shape))
    for rank, x in enumerate(shards):
        for here, there, length in division.spans(rank, 0, division.size(rank)):
            whole.narrow(dim, there, length).copy_(x.narrow(dim, here, length))
    return whole
