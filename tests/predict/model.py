"""Models and steps for the proofs of predictions."""

from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World
from shardwise.engine.engine import Engine
from shardwise.engine.options import EngineOptions
from shardwise.engine.predict import Predictor
from shardwise.models.gpt import GPT, GPTConfig, random_text
from shardwise.models.gpt import loss as gpt_loss
from shardwise.models.gpt import tokens as gpt_tokens
from shardwise.models.initial import fill

SMALL = {"layers": 3, "heads": 2, "kv_heads": 2, "sequence": 8, "vocabulary": 61}


class Mixed(nn.Module):
    """Batch norm (buffers that change), a frozen layer, two element types, a shape of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 24)
        self.frozen = nn.Linear(24, 24)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.norm = nn.BatchNorm1d(24)
        self.scale = nn.Parameter(torch.ones(24, dtype=torch.float64))
        with torch.no_grad():
            for k, p in enumerate(self.parameters()):
                p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p) / (k + 1))
        for p in self.frozen.parameters():
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(self.table(x))
        for block in self.blocks:
            h = h + block(h).tanh()
        return self.norm(h).double() * self.scale


def mixed_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def plain(kind: str) -> nn.Module:
    """A small model before it is laid out."""
    if kind == "mixed":
        return Mixed()
    model = GPT(GPTConfig(width=64, hidden=128, tied=kind == "tied", **SMALL))
    fill(model, 0)
    return model


def options_of(kind: str, **options: Any) -> dict[str, Any]:
    """The options of an engine and of its predictions: units of one block each."""
    own = {"loss": gpt_loss, "tokens": gpt_tokens, "units": "blocks.*"}
    if kind == "mixed":
        own = {"loss": mixed_loss, "units": nn.Linear}
    return {"optimizer": sw.AdamW(lr=1e-3)} | options | own


def engine(world: World, plan: str, kind: str = "gpt", **options: Any) -> Engine:
    """An engine on a small model, rank 0's weights on all ranks."""
    return sw.parallelize(plain(kind), plan, world, **options_of(kind, **options))


def foreseen(rank: int, plan: str, kind: str = "gpt", **options: Any) -> Predictor:
    """The predictions for the same engine."""
    return Predictor(plain(kind), plan, EngineOptions(**options_of(kind, **options)), rank=rank)


def batch(engine: Engine, kind: str, step: int, rows: int | None = None) -> Any:
    """This rank's rows of one step."""
    rows = rows or 2 * engine.plan.accumulate
    text = random_text(rows, 8, 61, 100 * step + engine.data_rank)
    return text if kind != "mixed" else text["inputs"][:, 0] % 13
