"""A mixture-of-experts GPT: the GPT of gpt.py with routed experts as its feed-forward layers.

Shapes are suffixes of names, as in gpt.py. The hidden width of the configuration is that of one
expert: with k experts per token and one shared expert, a token takes as many operations as in a GPT
whose hidden width is k + 1 times as large.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.core.errors import bad
from shardwise.core.layouts.tensor_table import Table
from shardwise.models import gpt
from shardwise.models.gpt import NORM_EPS, Attention, GPTConfig, SwiGLU, rotation
from shardwise.models.trainable import Loss
from shardwise.techniques.expert.gate import FIXED, GATES, Gate
from shardwise.techniques.expert.moe_layer import MoE, name_layers

FORM: Final = "GATE, and after colons a capacity, the number of experts, and those of a token"
TINY: Final = GPTConfig(
    vocabulary=256, layers=2, hidden_size=64, heads=4, kv_heads=2, intermediate_size=96, sequence=32
)


@dataclass(frozen=True)
class MoEConfig:
    """The sizes of a MoE GPT.

    gpt     the sizes of everything else; its `intermediate_size` is the hidden width of one expert
    gate    the gate of every layer, with the number of experts
    shared  how many experts of that width all tokens share
    seed    of the random numbers of the gates
    """

    gpt: GPTConfig
    gate: Gate
    shared: int = 0
    seed: int = 0

    @property
    def vocabulary(self) -> int:
        return self.gpt.vocabulary

    @property
    def layers(self) -> int:
        return self.gpt.layers

    @property
    def sequence(self) -> int:
        return self.gpt.sequence

    @property
    def loss(self) -> Loss:
        return loss

    @property
    def numbers(self) -> dict[str, Any]:
        gate = self.gate
        own = {"experts": gate.experts, "experts_per_token": gate.k, "gate": gate.name}
        return self.gpt.numbers | own | {"capacity": gate.capacity, "shared_experts": self.shared}

    def build(self) -> nn.Module:
        return MoEGPT(self)

    def fill(self, seed: int) -> "partial[None]":
        return self.gpt.fill(seed)

    @property
    def parameters(self) -> int:
        """Of all experts, also shared ones, and the routers."""
        gpt, name, experts = self.gpt, self.gate.name, self.gate.experts
        all_experts = gpt.intermediate_size * (experts + self.shared)
        dense = replace(gpt, intermediate_size=all_experts).parameters
        routers = {"noisy-topk": 2}.get(name, int(name not in FIXED))
        return dense + gpt.layers * routers * gpt.hidden_size * experts

    @property
    def flops_per_token(self) -> int:
        """As a GPT's, of the experts that a token uses or all share, and the router."""
        gpt, used = self.gpt, self.gate.k + self.shared
        dense = replace(gpt, intermediate_size=gpt.intermediate_size * used).flops_per_token
        return dense + 6 * gpt.layers * gpt.hidden_size * self.gate.experts


def tiny(text: str) -> MoEConfig:
    """A small MoE GPT under `GATE[:CAPACITY[:EXPERTS[:K]]]`, as in `topk:1.25` or `topk::8:3`.
    Without these it is dropless, with 4 experts of which a token uses 2.
    """
    name, *numbers = text.split(":")
    if len(numbers) > 3:
        raise bad(f'the gate "{text}"', FORM, f'"{name}:1.25"')
    factor, experts, k = (*numbers, *[""] * (3 - len(numbers)))
    losses = {} if name in FIXED else {"balance": 1e-2, "z": 1e-3}
    try:
        capacity = float(factor) if factor else None
        counts = int(experts or 4), int(k or GATES.get(name) or 2)
    except ValueError as error:
        raise bad(f'the gate "{text}"', FORM, f'"{name}:1.25"') from error
    return MoEConfig(TINY, Gate(name, *counts, capacity, losses=losses), shared=1)


class MoEOutput(NamedTuple):
    """Logits [B, T, V], and the sum of the auxiliary losses of all layers, without dims."""

    logits: Tensor
    auxiliary: Tensor


class MoEGPT(nn.Module):
    """tokens [B, T] -> MoEOutput."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config, sizes = config, config.gpt
        self.embed = nn.Embedding(sizes.vocabulary, sizes.hidden_size)
        self.blocks = nn.ModuleList(MoEBlock(config) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden_size, eps=NORM_EPS)
        self.head = nn.Linear(sizes.hidden_size, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.embed.weight
        name_layers(self)

    def forward(
        self, tokens_BT: Tensor, experts_BT: Tensor | None = None, mask: Tensor | None = None
    ) -> MoEOutput:
        """`experts_BT`: the expert of each token, for the gate `assigned`; `mask` as in a GPT."""
        x_BTD = self.embed(tokens_BT)
        turn = rotation(tokens_BT.shape[1], self.config.gpt.head_width, x_BTD)
        target_BT = tokens_BT if self.config.gate.name == "hash" else experts_BT
        auxiliary = torch.zeros((), dtype=torch.promote_types(x_BTD.dtype, torch.float32))
        auxiliary = auxiliary.to(x_BTD.device)
        for block in self.blocks:
            x_BTD, auxiliary = block(x_BTD, auxiliary, turn, target_BT, mask)
        return MoEOutput(self.head(self.norm(x_BTD)), auxiliary)

    @property
    def tensor_table(self) -> Table:
        """A GPT's table, for the experts that tokens share; routed ones need none (stacked.py)."""
        like = gpt.table_of(self.config.gpt, "moe.shared", "moe_norm")
        return replace(like, sequence=(*like.sequence, ("blocks.*.moe", "gather")))


class MoEBlock(nn.Module):
    """A layer of the MoE GPT, which adds its auxiliary loss to the sum so far."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        sizes = config.gpt
        self.attn_norm = nn.RMSNorm(sizes.hidden_size, eps=NORM_EPS)
        self.attn = Attention(sizes)
        self.moe_norm = nn.RMSNorm(sizes.hidden_size, eps=NORM_EPS)
        wide = replace(sizes, intermediate_size=sizes.intermediate_size * max(1, config.shared))
        shared = SwiGLU(wide) if config.shared else None
        self.moe = MoE(
            sizes.hidden_size, sizes.intermediate_size, config.gate, shared, seed=config.seed
        )

    def forward(
        self,
        x_BTD: Tensor,
        auxiliary: Tensor,
        turn: tuple[Tensor, Tensor],
        target_BT: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """From x [B, T, D] to [B, T, D], and `auxiliary` plus the layer's own loss."""
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), turn, mask)
        made_BTD, own = self.moe(self.moe_norm(x_BTD), target_BT)
        return x_BTD + made_BTD, auxiliary + own


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy as gpt.loss, plus the auxiliary losses of the global batch in training.
    It is finite without targets too: this rank's tokens go through experts of other ranks, and
    theirs through its own, so that its gradients count in any case.
    """
    mask = {"mask": batch["attention_mask"]} if "attention_mask" in batch else {}
    found = model(batch["inputs"], batch.get("experts"), **mask)
    summed = gpt.cross_entropy(found.logits, batch["targets"], "sum")
    return summed / max(1, gpt.tokens(batch)) + found.auxiliary


def batch(config: MoEConfig, rows: int, seed: int) -> dict[str, Tensor]:
    """Uniform random tokens, and the expert of each where the gate reads it."""
    made = gpt.random_text(rows, config.sequence, config.vocabulary, seed)
    if config.gate.name == "assigned":
        generator = torch.Generator().manual_seed(seed + 1)
        shape = rows, config.sequence
        made["experts"] = torch.randint(config.gate.experts, shape, generator=generator)
    return made
