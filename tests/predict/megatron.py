"""The models of the golden tables of time, as their programs computed them.

Megatron    GPT with learned positions, LayerNorm, biases, GELU of 4 h features and dropout.
            Attention is not fused; scale, mask and softmax are one kernel. (arXiv 2104.04473)
torchtitan  Llama 3.1 8B of December 2024: rotary positions as complex numbers in fp32, RMSNorm
            of several kernels in fp32, fused attention.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.techniques.tensor.tensor_table import Table


class MegatronShape(NamedTuple):
    """A GPT of the paper; V = 51200 and s = 2048 unless stated."""

    heads: int
    hidden: int
    layers: int
    vocabulary: int = 51200
    sequence: int = 2048


class MegatronCore(nn.Module):
    """The part of attention that selective recomputation repeats: q, k, v [B H, T, E]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.bmm(q, k.transpose(1, 2))
        return torch.bmm(functional.dropout(torch.softmax(scores, -1), 0.1), v)


class MegatronAttention(nn.Module):
    """Attention of `heads` heads over x [B, T, D]."""

    def __init__(self, shape: MegatronShape) -> None:
        super().__init__()
        self.width, self.core = shape.hidden // shape.heads, MegatronCore()
        self.q = nn.Linear(shape.hidden, shape.hidden)
        self.k = nn.Linear(shape.hidden, shape.hidden)
        self.v = nn.Linear(shape.hidden, shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.width)).transpose(1, 2).flatten(0, 1)

        mixed = self.core(heads(self.q(x)), heads(self.k(x)), heads(self.v(x)))
        mixed = mixed.unflatten(0, (x.shape[0], -1))
        return self.out(mixed.transpose(1, 2).flatten(2))


class MegatronLayer(nn.Module):
    """One layer."""

    def __init__(self, shape: MegatronShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.attn = MegatronAttention(shape)
        self.fc1 = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.fc2 = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + functional.dropout(self.attn(self.norm1(x)), 0.1)
        return x + functional.dropout(self.fc2(functional.gelu(self.fc1(self.norm2(x)))), 0.1)


class Megatron(nn.Module):
    """tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, shape: MegatronShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        self.start = nn.Identity()  # where sequence parallelism splits the stream
        self.blocks = nn.ModuleList(MegatronLayer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.start(self.embed(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def megatron_table(shape: MegatronShape) -> Table:
    """Megatron's tensor parallelism of the model."""
    return Table.of(
        {
            "embed": "vocabulary",
            "blocks.*.attn.[qkv]": "colwise:heads",
            "blocks.*.attn.out": "rowwise:heads",
            "blocks.*.fc1": "colwise",
            "blocks.*.fc2": "rowwise",
            "head": "vocabulary",
        },
        heads=shape.heads,
        sequence={
            "start": "split",
            "blocks.*.norm[12]": "sequence",
            "norm": "sequence",
        },
    )


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The cross-entropy of the logits, in fp32; the targets have the shape of the tokens."""
    logits = model(tokens).float()
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class TitanNorm(nn.Module):
    """RMSNorm as torch 2.6 computed it: several kernels, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).type_as(x) * self.weight


def turned(x: Tensor) -> Tensor:
    """Rotary positions of x [B, T, H, E]: pairs in fp32, times complex numbers."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turn = torch.ones(x.shape[1], 1, x.shape[-1] // 2, dtype=torch.complex64, device=x.device)
    return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)


class TitanLayer(nn.Module):
    """One layer of Llama 3.1 8B: 32 heads, 8 of them for keys and values."""

    def __init__(self, width: int, hidden: int, heads: int, shared: int) -> None:
        super().__init__()
        self.head, own = width // heads, width // heads * shared
        self.repeats = heads // shared
        self.norm1, self.norm2 = TitanNorm(width), TitanNorm(width)
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, own, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head)) for layer in (self.wq, self.wk, self.wv))
        q, k = turned(q), turned(k).repeat_interleave(self.repeats, dim=2)
        v = v.repeat_interleave(self.repeats, dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.w2(functional.silu(self.w1(y)) * self.w3(y))


class Titan(nn.Module):
    """Llama 3.1 8B: tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, layers: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(128_256, 4096)
        self.blocks = nn.ModuleList(TitanLayer(4096, 14_336, 32, 8) for _ in range(layers))
        self.norm, self.head = TitanNorm(4096), nn.Linear(4096, 128_256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def megatron_flops(shape: MegatronShape, batch: int) -> float:
    """F of the paper, section 3: with full recomputation."""
    _, h, layers, vocabulary, s = shape
    inner = 1 + s / (6 * h) + vocabulary / (16 * layers * h)
    return 96 * batch * s * layers * h**2 * inner
