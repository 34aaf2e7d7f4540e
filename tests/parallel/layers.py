"""Small models with tables of their own, sizes that divide by nothing, and what trains them.

Each takes vectors of width 10 in a sequence and gives vectors of width 7, with every use of the
streams in between: `block` is once or twice under `blocks`, its first one split under `sp`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwise.techniques.tensor.tensor_table import Table
from tests.engine.cases import Task, regression, settled

WIDTH, HIDDEN, OUT = 10, 13, 7


class Stack(nn.Module):
    """A table's model: blocks, a norm, and an output layer that is gathered."""

    def __init__(self, table: Table, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.tensor_table = table
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Mlp(nn.Module):
    """Norm, two layers with biases, and the residual, all inside one module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Gated(nn.Module):
    """Two layers of columns that read the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Unused(nn.Module):
    """As Gated, with one more layer of columns, whose output nobody wants, or only with `by`."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.side = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.by == "no_grad":
            with torch.no_grad():
                scale = self.side(y).tanh()
            return x + self.down(self.up(y) * scale)
        if self.by == "detach":
            return x + self.down(self.up(y) * self.side(y).detach())
        self.side(y)
        return x + self.down(self.up(y))


class Packed(nn.Module):
    """Gate and up in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.both, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(self.norm(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Attention(nn.Module):
    """Heads of width 2 with biases and norms of their own; q, k and v apart or packed."""

    def __init__(self, heads: int, kv_heads: int, packed: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.packed = heads, kv_heads, packed
        self.norm = nn.LayerNorm(WIDTH)
        if packed:
            self.qkv = nn.Linear(WIDTH, 2 * (heads + 2 * kv_heads))
        else:
            self.q = nn.Linear(WIDTH, 2 * heads)
            self.k, self.v = nn.Linear(WIDTH, 2 * kv_heads), nn.Linear(WIDTH, 2 * kv_heads)
        self.q_norm, self.k_norm = nn.LayerNorm(2), nn.LayerNorm(2)
        self.out = nn.Linear(2 * heads, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.packed:
            sizes = [2 * self.heads, 2 * self.kv_heads, 2 * self.kv_heads]
            q, k, v = self.qkv(y).split(sizes, -1)
        else:
            q, k, v = self.q(y), self.k(y), self.v(y)
        q, k, v = (part.unflatten(-1, (-1, 2)) for part in (q, k, v))
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Both(nn.Module):
    """A whole layer between one whose output is gathered and one whose input is split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN)
        self.last = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.middle(torch.tanh(self.first(x))))


class Doubled(nn.Linear):
    """A linear layer that does more than its weight says."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, 2 * self.weight.sin(), self.bias)


class Mixed(nn.Module):
    """Plain layers of columns and one of another class, all reading the same; in any order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.norm = nn.LayerNorm(WIDTH)
        self.a, self.b = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.other, self.down = Doubled(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        made = {name: self.get_submodule(name)(y) for name in self.order.split()}
        return x + self.down(made["a"] * made["b"].sin() + made["other"].cos())


class Recomputed(nn.Module):
    """A block whose activations are made again in the backward pass."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant and not x.requires_grad:  # it would have no gradient
            return self.block(x)
        again: Any = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return again


class Inner(nn.Module):
    """Two layers and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Named(nn.Module):
    """Two blocks, of which one's name begins with the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.mlp2 = nn.LayerNorm(WIDTH), Inner(), Inner()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        return x + self.mlp2(self.norm(x))


@dataclass(frozen=True)
class Kind:
    """How one kind of block is made and cut; `names` are its layers in the table."""

    make: Callable[[], nn.Module]
    styles: Mapping[str, str]
    sequence: Mapping[str, str] = field(default_factory=lambda: {"norm": "sequence"})
    heads: int | None = None
    kv_heads: int | None = None
    sets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def model(self) -> nn.Module:
        """Two blocks of it, with settled weights, in fp64."""
        return settled(Stack(self.table(), [self.make() for _ in range(2)])).double()

    def table(self) -> Table:
        """The table of the model."""
        inner = {f"blocks.*.{name}": style for name, style in self.styles.items()}
        along = {f"blocks.*.{name}": style for name, style in self.sequence.items()}
        return Table.of(
            inner | {"head": "colwise_gather_output"},
            heads=self.heads,
            kv_heads=self.kv_heads,
            sequence={"blocks.0": "split", **along, "norm": "sequence"},
            sets={f"blocks.[01]{name}": numbers for name, numbers in self.sets.items()},
        )


PAIR = {"up": "colwise", "down": "rowwise"}
GATED = {"gate": "colwise", **PAIR}
UNUSED = {"side": "colwise", **PAIR}
NAMED = {f"{name}.{layer}": style for name in ("mlp", "mlp2") for layer, style in PAIR.items()}
MIXED = {"a": "colwise", "b": "colwise", "other": "colwise", "down": "rowwise"}
APART = {"q": "colwise:heads", "[kv]": "colwise:kv_heads", "out": "rowwise:heads"}
APART |= {"[qk]_norm": "replicated"}
TOGETHER = {"qkv": "colwise:qkv", "out": "rowwise:heads", "[qk]_norm": "replicated"}
COUNTS = {"": {"heads": "heads", "kv_heads": "kv_heads"}}


def attention(heads: int, kv_heads: int, packed: bool) -> Kind:
    """Attention with norms on its heads."""
    styles = TOGETHER if packed else APART
    make = partial(Attention, heads, kv_heads, packed)
    return Kind(make, styles, heads=heads, kv_heads=kv_heads, sets=COUNTS)


def frozen(kind: Kind, *names: str) -> Kind:
    """The kind with some of its parameters not trained."""

    def make() -> nn.Module:
        block = kind.make()
        for name in names:
            block.get_parameter(name).requires_grad_(False)
        return block

    return Kind(make, kind.styles, kind.sequence, kind.heads, kind.kv_heads, kind.sets)


def recomputed(kind: Kind, reentrant: bool = False) -> Kind:
    """The kind with its activations made again."""
    styles = {f"block.{name}": style for name, style in kind.styles.items()}
    sequence = {f"block.{name}": style for name, style in kind.sequence.items()}
    sets = {f".block{name}": numbers for name, numbers in kind.sets.items()}

    def make() -> nn.Module:
        return Recomputed(kind.make(), reentrant)

    return Kind(make, styles, sequence, kind.heads, kind.kv_heads, sets)


MLP = Kind(Mlp, PAIR)
ENDS = {"first": "colwise_gather_output", "last": "rowwise_split_input"}
KINDS: dict[str, Kind] = {
    "biases, norm and residual inside": MLP,
    "gated": Kind(Gated, GATED),
    "packed gate and up": Kind(Packed, {"both": "colwise:2", "down": "rowwise"}),
    "4 heads, 2 for keys": attention(4, 2, packed=False),
    "6 heads, 2 for keys": attention(6, 2, packed=False),
    "5 heads": attention(5, 5, packed=False),
    "packed qkv, 6 heads, 2 for keys": attention(6, 2, packed=True),
    "packed qkv, 6 heads, 1 for keys": attention(6, 1, packed=True),
    "frozen packed qkv": frozen(attention(6, 1, packed=True), "qkv.weight"),
    "gathered output, split input": Kind(Both, ENDS, {"middle": "whole"}),
    "gathered beside a longer name": Kind(Named, NAMED, {"norm": "sequence", "mlp": "gather"}),
    "another class last": Kind(partial(Mixed, "a b other"), MIXED),
    "another class first": Kind(partial(Mixed, "other b a"), MIXED),
    "a layer nobody reads": Kind(partial(Unused, "nothing"), UNUSED),
    "a layer read without gradient": Kind(partial(Unused, "detach"), UNUSED),
    "a layer under no_grad": Kind(partial(Unused, "no_grad"), UNUSED),
    "frozen columns": frozen(Kind(Gated, GATED), "gate.weight", "gate.bias", "up.weight"),
    "half frozen columns": frozen(Kind(Gated, GATED), "gate.bias", "up.weight"),
    "frozen rows": frozen(MLP, "down.weight", "down.bias", "norm.weight"),
    "recomputed": recomputed(Kind(Gated, GATED)),
    "recomputed attention": recomputed(attention(6, 2, packed=False)),
    "recomputed packed qkv": recomputed(attention(6, 2, packed=True)),
    "recomputed, reentrant": recomputed(MLP, reentrant=True),
}


def sequences(step: int, rows: int = 3, positions: int = 5) -> tuple[Tensor, Tensor]:
    """Rows of sequences of vectors, and what is to come out."""
    own = torch.Generator().manual_seed(3000 + step)
    x = torch.randn(rows, positions, WIDTH, generator=own, dtype=torch.float64)
    return x, x.cumsum(1).sin()[..., :OUT]


def task(name: str, rows: int = 3) -> Task:
    """The training of a kind of block."""
    return Task(KINDS[name].model, partial(sequences, rows=rows), regression, None)
