"""Models that do what models do: share, freeze, skip, recompute, return what they like.

Each takes vectors of width 6 and gives vectors of width 6, in fp64 unless it says otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.engine.cases import Task, rows_task, settled, vectors


class Block(nn.Module):
    """x + a little network of x."""

    def __init__(self, hidden: int = 9) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Twice(nn.Module):
    """One block, used twice; a module of it registered and used elsewhere too; a statistic."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.again = self.block.up
        self.out = nn.Linear(9, 6)
        self.register_buffer("seen", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.out(self.again(self.block(self.block(x))))
        self.seen = self.seen * 0.9 + out.detach().mean(0)
        return out


class ClassToken(nn.Module):
    """A parameter of the root that is put before the sequence; attention inside."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.embed = nn.Linear(1, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        sequence = self.embed(x.unsqueeze(-1))
        sequence = torch.cat([self.token.expand(len(x), -1, -1), sequence], 1)
        for layer in self.layers:
            sequence = layer(sequence)
        return self.head(sequence[:, 0])


class Lists(nn.Module):
    """Parameters in lists and dicts, and one that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(6, 6) for _ in range(3))
        self.named = nn.ParameterDict({"shift": torch.zeros(6)})
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = torch.tanh(x @ w + self.named["shift"])
        return x * self.scale


class Sparse(nn.Module):
    """A trained table that is looked up sparsely."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6, sparse=True)
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.table((x[:, 0].abs() * 2).long() % 5))


@dataclass
class Output:
    value: Tensor
    note: str = "a number beside it"


#: Ways to wrap an output, and to unwrap it.
OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (Output, lambda out: out.value),
    "dict": (lambda x: {"value": x, "note": "none"}, lambda out: out["value"]),
    "tuple": (lambda x: (None, [x]), lambda out: out[1][0]),
    "object": (lambda x: Normal(x, 1.0), lambda out: out.loc),
}


class Wrapped(nn.Module):
    def __init__(self, how: str, inner: nn.Module) -> None:
        super().__init__()
        self.how, self.inner = how, inner

    def forward(self, x: Tensor) -> Tensor:
        return OUTPUTS[self.how][0](self.inner(x))


class Unwrapping(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, Wrapped)
            x = OUTPUTS[block.how][1](block(x))
        return x


def speaks(how: str) -> nn.Module:
    """Blocks whose outputs are wrapped, inside and outside, in the same way."""
    return Wrapped(how, Unwrapping(*[Wrapped(how, Block()) for _ in range(2)]))


class Recomputed(Stack):
    """Checkpointing: around each block, around a part of each, or around all of them."""

    def __init__(self, where: str, reentrant: bool) -> None:
        inner = Block if where != "inside" else lambda: Inside(reentrant)
        super().__init__(*[inner() for _ in range(3)])
        self.where, self.reentrant = where, reentrant
        self.first = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.where == "all":
            return checkpoint(super().forward, x, use_reentrant=self.reentrant)
        for block in self.blocks:
            around = self.where == "around"
            x = checkpoint(block, x, use_reentrant=self.reentrant) if around else block(x)
        return x


class Inside(nn.Module):
    """A unit that recomputes a part of itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.reentrant = Block(), nn.Linear(6, 6), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(self.a, x, use_reentrant=self.reentrant))


class Gated(nn.Module):
    """`side` is used for rows that begin above 1 only, `never` for none."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side, self.never = Block(), nn.Linear(6, 6), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, chosen = self.main(x), x[:, 0] > 1
        if chosen.any():
            out = out + chosen.unsqueeze(1) * self.side(x)
        return out


class ByHook(nn.Module):
    """Its weight is made before each forward, by a hook of its own (the old weight_norm)."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.way = nn.Parameter(torch.ones(6, 1)), nn.Parameter(torch.ones(6, 6))
        self.register_forward_pre_hook(ByHook.prepare)
        self.prepare()

    def prepare(self, _: Any = None) -> None:
        self.weight = self.size * self.way / self.way.norm(dim=1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight).tanh()


def frozen(which: str) -> nn.Module:
    """Three blocks of which some parts are not trained."""
    model = Stack(*[Block() for _ in range(3)])
    for name, p in model.named_parameters():
        p.requires_grad_(which not in name)
    return model


class Affine(nn.Module):
    """A parameter of three dimensions, and a scalar that rank 1 holds."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, 1, 6))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift).squeeze(0)


class Dims(nn.Module):
    """Parameters of zero to four dimensions; several ranks hold nothing of some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.conv = nn.Linear(6, 12), nn.Conv2d(3, 5, 2)
        self.norm, self.leave = nn.LayerNorm(5), nn.Linear(5, 6)
        self.last = Affine()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(torch.tanh(self.enter(x)).view(-1, 3, 2, 2)).flatten(1)
        return self.last(self.leave(self.norm(y)))


def dims() -> nn.Module:
    return settled(Dims()).double()


class Buffered(nn.Module):
    """Tied weights, a shared module, a scalar; buffers: a statistic, and one that is not kept."""

    ramp: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.blocks = nn.Sequential(*[nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)])
        self.leave = nn.Linear(6, 6)
        self.leave.weight = self.enter.weight
        self.again = self.blocks[2]
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("ramp", torch.arange(6.0))
        self.register_buffer("passing", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.again(self.blocks(self.norm(self.enter(x)))) + self.ramp
        if self.training:
            self.ramp.mul_(0.9).add_(y.detach().mean(0))
        return self.leave(y) * self.scale


ZOO = {
    "sequential": lambda: nn.Sequential(nn.Linear(6, 11), nn.GELU(), nn.Linear(11, 6)),
    "one layer": lambda: nn.Linear(6, 6),
    "stack": lambda: Stack(*[Block() for _ in range(3)]),
    "dropout": lambda: Stack(*[nn.Sequential(Block(), nn.Dropout(0.5)) for _ in range(3)]),
    "twice": Twice,
    "same block three times": lambda: Stack(*[Block()] * 3),
    "class token": ClassToken,
    "lists": Lists,
    "weight norm": lambda: Stack(
        parametrizations.weight_norm(nn.Linear(6, 6)),
        parametrizations.weight_norm(nn.Linear(6, 6, bias=False)),
    ),
    "weight by a hook": lambda: Stack(Block(), ByHook(), ByHook()),
    "sparse": Sparse,
    "first frozen": lambda: frozen("blocks.0"),
    "middle frozen": lambda: frozen("blocks.1"),
    "last frozen": lambda: frozen("blocks.2"),
    "part of each frozen": lambda: frozen("up.weight"),
    "biases only": lambda: frozen("weight"),
    **{f"returns a {how}": partial(speaks, how) for how in ("dataclass", "dict", "tuple")},
    "returns an object": partial(speaks, "object"),
    **{
        f"checkpoint {where}{' reentrant' * reentrant}": lambda w=where, r=reentrant: Recomputed(
            w, r
        )
        for where in ("inside", "around", "all")
        for reentrant in (False, True)
    },
}


def make(name: str) -> nn.Module:
    return settled(ZOO[name]())


def any_output(how: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(OUTPUTS[how][1](model(batch[0])), batch[1])


def two_views(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Two passes through the model, of which every gradient is the sum."""
    x, y = batch
    return functional.mse_loss(model(x), y) + functional.mse_loss(model(-x), y)


def penalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A block is called outside of the root's forward, and one runs without a use."""
    x, y = batch
    assert isinstance(model, Stack)
    first, *rest = model.blocks
    hidden = first(x)
    with torch.no_grad():
        rest[-1](hidden)
    return functional.mse_loss(model(x), y) + hidden.square().mean()


def steered(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Hooks that are on the blocks for one pass: one changes an input, one keeps an output; and an
    attribute that a block reads.
    """
    assert isinstance(model, Stack)
    kept = list[Any]()
    hooks = [
        model.blocks[0].register_forward_hook(lambda _, __, out: kept.append(out)),
        model.blocks[-1].register_forward_pre_hook(lambda _, given: (given[0] * 1.1,)),
    ]
    block: Any
    for number, block in enumerate(model.blocks):
        block.scale = 1 / (1 + number)
    out = model(batch[0])
    for hook in hooks:
        hook.remove()
    return functional.mse_loss(out, batch[1]) + kept[0].square().mean()


def freezing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A part of which each rank holds pieces is frozen in the first step."""
    assert isinstance(model, Stack)
    model.blocks[0].requires_grad_(False)
    return functional.mse_loss(model(batch[0]), batch[1])


def scaled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    weights = {name: p * 0.9 for name, p in model.named_parameters() if p.ndim > 1}
    return functional.mse_loss(functional_call(model, weights, batch[0]), batch[1])


def in_eval(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Without dropout; the model has its modes again where the function ends."""
    modes = [module.training for module in model.modules()]
    loss = functional.mse_loss(model.eval()(batch[0]), batch[1])
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    return loss


def task_of(name: str) -> Task:
    task = rows_task(partial(make, name))
    if name.startswith("returns"):
        return Task(task.make, task.batch, partial(any_output, name.rpartition(" ")[2]), None)
    return task


TASKS = {
    "two passes": Task(partial(make, "stack"), vectors, two_views, None),
    "parts on their own": Task(partial(make, "stack"), vectors, penalised, None),
    "other weights": Task(partial(make, "stack"), vectors, scaled, None),
    "freezing": Task(partial(make, "stack"), vectors, freezing, None),
    "hooks in the loss": Task(partial(make, "stack"), vectors, steered, None),
    "dropout off in the loss": Task(partial(make, "dropout"), vectors, in_eval, None),
    **{name: task_of(name) for name in ZOO if name != "dropout"},
}


def gated(step: int) -> tuple[Tensor, Tensor]:
    """Only the first row asks for `side`, and not in step 1."""
    x, y = vectors(step)
    x[:, 0] = x[:, 0].clamp(max=0.9)
    x[0, 0] = 2.0 if step != 1 else 0.0
    return x, y


DECAY = {
    "AdamW": {"kind": torch.optim.AdamW, "options": {"lr": 0.1, "weight_decay": 0.5}},
    "SGD": {"kind": torch.optim.SGD, "options": {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.9}},
}
