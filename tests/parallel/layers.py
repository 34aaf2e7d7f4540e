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

from shardwise.core.layouts.tensor_table import Table
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


class Parts(nn.Module):
    """A norm, and layers from one width to another; `use(self, x)` is what it makes with them."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.use, self.norm = use, nn.LayerNorm(WIDTH)
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def up(width: int = HIDDEN, bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, width, bias)


def down() -> nn.Linear:
    return nn.Linear(HIDDEN, WIDTH)


def mlp(factor: float = 1.0) -> nn.Module:
    """Norm, two layers with biases, and the residual; the batch is multiplied in place."""

    def use(m: Any, x: Tensor) -> Tensor:
        x = x if x.requires_grad or factor == 1 else x.mul_(factor)
        return x + m.down(functional.gelu(m.up(m.norm(x))))

    return Parts(use, up=up(), down=down())


def gated() -> nn.Module:
    """Two layers of columns that read the same."""

    def use(m: Any, x: Tensor) -> Tensor:
        x = m.norm(x)
        return m.down(functional.silu(m.gate(x)) * m.up(x))

    return Parts(use, gate=up(), up=up(bias=False), down=down())


def unused(by: str) -> nn.Module:
    """As gated, with one more layer of columns, whose output nobody wants, or only with `by`."""

    def use(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        with torch.set_grad_enabled(by != "no_grad"):
            scale = m.side(y).tanh()
        return x + m.down(m.up(y) * (1 if by == "nothing" else scale.detach()))

    return Parts(use, up=up(), side=up(), down=down())


def packed() -> nn.Module:
    def use(m: Any, x: Tensor) -> Tensor:
        gate, up = m.both(m.norm(x)).chunk(2, -1)
        return x + m.down(functional.silu(gate) * up)

    return Parts(use, both=up(2 * HIDDEN), down=down())


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


def both() -> nn.Module:
    """A whole layer between one whose output is gathered and one whose input is split."""
    use = lambda m, x: x + m.last(m.middle(torch.tanh(m.first(x))))  # noqa: E731
    made = Parts(use, first=up(), middle=nn.LayerNorm(HIDDEN), last=down())
    del made.norm
    return made


class Doubled(nn.Linear):
    """A linear layer that does more than its weight says."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, 2 * self.weight.sin(), self.bias)


def mixed(order: str) -> nn.Module:
    """Plain layers of columns and one of another class, all reading the same; in any order."""

    def use(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        made = {name: m.get_submodule(name)(y) for name in order.split()}
        return x + m.down(made["a"] * made["b"].sin() + made["other"].cos())

    return Parts(use, a=up(), b=up(), other=Doubled(WIDTH, HIDDEN), down=down())


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
MIXED = {"a": "colwise", "b": "colwise", "other": "colwise", "down": "rowwise"}
APART = {"q": "colwise:heads", "[kv]": "colwise:kv_heads", "out": "rowwise:heads"}
APART |= {"[qk]_norm": "replicated"}
TOGETHER = {"qkv": "colwise:qkv", "out": "rowwise:heads", "[qk]_norm": "replicated"}
COUNTS = {"": {"heads": "heads", "kv_heads": "kv_heads"}}


def attention(heads: int, kv_heads: int, packed: bool) -> Kind:
    styles = TOGETHER if packed else APART
    make = partial(Attention, heads, kv_heads, packed)
    return Kind(make, styles, heads=heads, kv_heads=kv_heads, sets=COUNTS)


def frozen(kind: Kind, *names: str) -> Kind:
    def make() -> nn.Module:
        block = kind.make()
        for name in names:
            block.get_parameter(name).requires_grad_(False)
        return block

    return Kind(make, kind.styles, kind.sequence, kind.heads, kind.kv_heads, kind.sets)


def recomputed(kind: Kind, reentrant: bool = False) -> Kind:
    styles = {f"block.{name}": style for name, style in kind.styles.items()}
    sequence = {f"block.{name}": style for name, style in kind.sequence.items()}
    sets = {f".block{name}": numbers for name, numbers in kind.sets.items()}

    def make() -> nn.Module:
        return Recomputed(kind.make(), reentrant)

    return Kind(make, styles, sequence, kind.heads, kind.kv_heads, sets)


MLP = Kind(mlp, PAIR)
ENDS = {"first": "colwise_gather_output", "last": "rowwise_split_input"}
KINDS: dict[str, Kind] = {
    "biases, norm and residual inside": MLP,
    "writes to the batch": Kind(partial(mlp, 0.5), PAIR),
    "gated": Kind(gated, GATED),
    "packed gate and up": Kind(packed, {"both": "colwise:2", "down": "rowwise"}),
    "4 heads, 2 for keys": attention(4, 2, packed=False),
    "6 heads, 2 for keys": attention(6, 2, packed=False),
    "packed qkv, 6 heads, 2 for keys": attention(6, 2, packed=True),
    "packed qkv, 6 heads, 1 for keys": attention(6, 1, packed=True),
    "gathered output, split input": Kind(both, ENDS, {"middle": "whole"}),
    "another class last": Kind(partial(mixed, "a b other"), MIXED),
    "another class first": Kind(partial(mixed, "other b a"), MIXED),
    "a layer nobody reads": Kind(partial(unused, "nothing"), UNUSED),
    "a layer read without gradient": Kind(partial(unused, "detach"), UNUSED),
    "a layer under no_grad": Kind(partial(unused, "no_grad"), UNUSED),
    "frozen columns": frozen(Kind(gated, GATED), "gate.weight", "gate.bias", "up.weight"),
    "frozen rows": frozen(MLP, "down.weight", "down.bias", "norm.weight"),
    "recomputed": recomputed(Kind(gated, GATED)),
    "recomputed attention": recomputed(attention(6, 2, packed=False)),
    "recomputed, reentrant": recomputed(MLP, reentrant=True),
}


def sequences(step: int, rows: int = 3, positions: int = 5) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(3000 + step)
    x = torch.randn(rows, positions, WIDTH, generator=own, dtype=torch.float64)
    return x, x.cumsum(1).sin()[..., :OUT]


def task(name: str, rows: int = 3) -> Task:
    return Task(KINDS[name].model, partial(sequences, rows=rows), regression, None)
