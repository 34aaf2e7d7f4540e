"""A GPT: a decoder-only transformer, its loss, and its counts of parameters and operations.

Pre-normalisation with RMSNorm (arXiv 1910.07467), rotary positions (arXiv 2104.09864), SwiGLU
(arXiv 2002.05202), grouped key and value heads (arXiv 2305.13245), no biases, no dropout.

Shapes are suffixes of names:

    B  sequences in the batch          D  width of the residual stream
    T  positions in a sequence         F  hidden width of the feed-forward layer
    V  vocabulary                      H  query heads
    E  width of one head, D / H        K  key and value heads, a divisor of H
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.core.errors import bad
from shardwise.core.layouts.tensor_table import Table
from shardwise.models.trainable import Loss, initial

ROTARY_BASE: Final = 10_000.0
NORM_EPS: Final = 1e-6
IGNORED: Final = -100  # a target that the loss ignores


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT. Raises InputError if they do not fit together."""

    vocabulary: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    intermediate_size: int
    sequence: int
    tied: bool = False

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "tied" and value < 1:
                raise bad(f"{name} = {value}", "1 or more", f"{name} = 1")
        if self.hidden_size % (2 * self.heads):
            pairs = 2 * self.heads
            raise bad(
                f"hidden_size = {self.hidden_size} with heads = {self.heads}",
                "a size that splits into heads of an even size (positions rotate pairs)",
                f"hidden_size = {pairs * max(1, round(self.hidden_size / pairs))}",
            )
        if self.heads % self.kv_heads:
            raise bad(
                f"kv_heads = {self.kv_heads} with heads = {self.heads}",
                "a divisor of heads, so that key and value heads serve equally many query heads",
                f"kv_heads = {self.heads}",
            )

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.heads

    @property
    def loss(self) -> Loss:
        return loss

    @property
    def numbers(self) -> dict[str, Any]:
        return asdict(self)

    def build(self) -> nn.Module:
        return GPT(self)

    def fill(self, seed: int) -> "partial[None]":
        return partial(initial, seed=seed)

    @property
    def parameters(self) -> int:
        """Ψ, shared ones once; by arithmetic, since huge sizes cannot be built, even on meta."""
        ends = self.vocabulary * self.hidden_size * (1 if self.tied else 2)
        return self.layers * (self._multiplied + 2 * self.hidden_size) + ends + self.hidden_size

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of forward and backward for one token, two to a multiply-add.
        Six per weight of a matrix product (the embedding is a lookup), and 12·D·T per layer for the
        attention scores and their use, as PaLM counts them (arXiv 2204.02311, appendix B), without
        credit for the causal mask.
        """
        weights = self.layers * self._multiplied + self.vocabulary * self.hidden_size
        return 6 * weights + 12 * self.layers * self.hidden_size * self.sequence

    @property
    def _multiplied(self) -> int:
        """The weights of a layer in matrix products: of attention, then of the three of SwiGLU."""
        attention = 2 * self.hidden_size * (self.hidden_size + self.kv_heads * self.head_width)
        return attention + 3 * self.hidden_size * self.intermediate_size


SIZES: Final[dict[str, GPTConfig]] = {
    # little computation: shows the overhead of a framework
    "tiny": GPTConfig(1024, 4, 128, heads=4, kv_heads=4, intermediate_size=352, sequence=64),
    # 33M parameters: computation and communication take about the same time on a CPU core
    "small": GPTConfig(8192, 8, 512, heads=8, kv_heads=8, intermediate_size=1344, sequence=128),
    # bytes of text on a laptop, in minutes
    "quickstart": GPTConfig(256, 4, 256, heads=4, kv_heads=2, intermediate_size=704, sequence=256),
}


class GPT(nn.Module):
    """tokens [B, T] -> logits [B, T, V]. A `mask` [B, 1, T, T] says what attends to what; without
    one, attention is causal.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=NORM_EPS)
        self.head = nn.Linear(config.hidden_size, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor, mask: Tensor | None = None) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        turn = rotation(tokens_BT.shape[1], self.config.head_width, x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD, turn, mask)
        return self.head(self.norm(x_BTD))

    @property
    def tensor_table(self) -> Table:
        """The tensor-parallel table: attention by heads, feed-forward by F, both ends by V."""
        return table_of(self.config)


def table_of(config: GPTConfig, mlp: str = "mlp", norm: str = "mlp_norm") -> Table:
    """The table of a GPT whose blocks have a feed-forward layer `mlp`, after `norm`."""
    may_lack = "" if mlp == "mlp" else "?"
    return Table.of(
        {
            "embed": "vocabulary",
            "blocks.*.attn.q": "colwise:heads",
            "blocks.*.attn.[kv]": "colwise:kv_heads",
            "blocks.*.attn.out": "rowwise:heads",
            f"blocks.*.{mlp}.gate{may_lack}": "colwise",
            f"blocks.*.{mlp}.up{may_lack}": "colwise",
            f"blocks.*.{mlp}.down{may_lack}": "rowwise",
            "head": "vocabulary",
        },
        heads=config.heads,
        kv_heads=config.kv_heads,
        sequence={
            "embed": "vocabulary:sequence",
            "blocks.*.attn_norm": "sequence",
            f"blocks.*.{norm}": "sequence",
            "norm": "sequence",
        },
    )


class Block(nn.Module):
    """One layer: each half reads the normalised stream and adds its output to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=NORM_EPS)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=NORM_EPS)
        self.mlp = SwiGLU(config)

    def forward(
        self, x_BTD: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> Tensor:
        """From x [B, T, D] to [B, T, D]."""
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), turn, mask)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Attention(nn.Module):
    """Causal attention with rotary positions; H/K query heads share a key and value head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.grouped = config.kv_heads != config.heads
        self.q = nn.Linear(config.hidden_size, config.heads * config.head_width, bias=False)
        self.k = nn.Linear(config.hidden_size, config.kv_heads * config.head_width, bias=False)
        self.v = nn.Linear(config.hidden_size, config.kv_heads * config.head_width, bias=False)
        self.out = nn.Linear(config.heads * config.head_width, config.hidden_size, bias=False)

    def forward(
        self, x_BTD: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> Tensor:
        """From x [B, T, D] to [B, T, D]; `turn` is the rotation of every position."""
        q_BTHE = rotate(self.q(x_BTD).unflatten(-1, (-1, self.head_width)), turn)
        k_BTKE = rotate(self.k(x_BTD).unflatten(-1, (-1, self.head_width)), turn)
        v_BTKE = self.v(x_BTD).unflatten(-1, (-1, self.head_width))
        mixed_BHTE = functional.scaled_dot_product_attention(
            q_BTHE.transpose(1, 2),
            k_BTKE.transpose(1, 2),
            v_BTKE.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.grouped,
        )
        return self.out(mixed_BHTE.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), from D to F and back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden_BTF = functional.silu(self.gate(x_BTD)) * self.up(x_BTD)
        return self.down(hidden_BTF)


def rotation(positions: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [T, 1, E/2], of the angle by which each pair turns at each position.
    The angles are computed in fp32 or wider: bf16 cannot represent all integers above 256.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    pair = torch.arange(0, head_width, 2, device=like.device, dtype=dtype)
    position = torch.arange(positions, device=like.device, dtype=dtype)
    angle = torch.outer(position, ROTARY_BASE ** (-pair / head_width)).unsqueeze(1)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x_BTHE: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pair i of every head, (x[i], x[i + E/2]), by the angle of its position."""
    cos, sin = turn
    a, b = x_BTHE.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy in nats, the mean over the targets that are not -100, in fp32 or wider.
    `batch["inputs"]` and `batch["targets"]` are token numbers [B, T].
    """
    mask = {"mask": batch["attention_mask"]} if "attention_mask" in batch else {}
    return cross_entropy(model(batch["inputs"], **mask), batch["targets"])


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor, reduction: str = "mean") -> Tensor:
    wide = logits_BTV.flatten(0, 1).to(torch.promote_types(logits_BTV.dtype, torch.float32))
    targets = targets_BT.flatten()
    return functional.cross_entropy(wide, targets, ignore_index=IGNORED, reduction=reduction)


def random_text(rows: int, positions: int, vocabulary: int, seed: int) -> dict[str, Tensor]:
    """Uniform random tokens: `inputs` [rows, positions], and `targets`, the tokens one later."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(vocabulary, (rows, positions + 1), generator=generator)
    return {"inputs": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def tokens(batch: dict[str, Tensor]) -> int:
    """The number of targets in the mean of `loss`: the weight of this batch in a larger mean."""
    return int((batch["targets"] != IGNORED).sum())
