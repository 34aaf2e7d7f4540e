"""Models that do between their layers what models do: skip, tie, write in place, return dicts."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH = 6, 5


class Block(nn.Module):
    """x + a little network of x."""

    kind = "full"

    def __init__(self, hidden: int = 9) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Four blocks one after the other, and modules that are defined before and after them."""

    def __init__(self, before: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        if before is not None:
            self.before = before
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        if after is not None:
            self.after = after

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Skips(Stack):
    """A U-net in outline: the outputs of the first half are added in the second."""

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for block in self.blocks[:2]:
            x = block(x)
            kept.append(x * 2)
        for block in self.blocks[2:]:
            x = block(torch.cat([x, kept.pop()], -1).unflatten(-1, (2, WIDTH)).sum(-2))
        return x


class Pair(NamedTuple):
    x: Tensor
    size: int


@dataclass
class Output:
    x: Tensor
    note: str = "beside it"


class Speaks(nn.Module):
    """Blocks whose outputs are wrapped in the way `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Wrapped(how) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Any = wrapped(x, self.how)
        for block in self.blocks:
            out = block(out)
        return unwrapped(out, self.how)


class Wrapped(nn.Module):
    """One block of Speaks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, Block()

    def forward(self, given: Any) -> Any:
        return wrapped(self.inner(unwrapped(given, self.how)), self.how)


def wrapped(x: Tensor, how: str) -> Any:
    return {
        "tuple": lambda: (None, [x]),
        "named tuple": lambda: Pair(x, 3),
        "dict": lambda: {"x": x, "note": "none"},
        "dataclass": lambda: Output(x),
    }[how]()


def unwrapped(out: Any, how: str) -> Tensor:
    return {
        "tuple": lambda: out[1][0],
        "named tuple": lambda: out.x,
        "dict": lambda: out["x"],
        "dataclass": lambda: out.x,
    }[how]()


class Look(nn.Module):
    """A value and a mask, through which no gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inner(x)
        return x, x > 0


class Masks(Stack):
    """The first layer makes a mask for all others."""

    def __init__(self) -> None:
        super().__init__(before=Look())

    def forward(self, x: Tensor) -> Tensor:
        x, mask = self.before(x)
        for block in self.blocks:
            x = block(x) * mask
        return x


class Writes(Stack):
    """In place between layers: on what a layer made, on a part of it, on what was there before."""

    def forward(self, x: Tensor) -> Tensor:
        table = torch.zeros(len(x), LENGTH, WIDTH, dtype=x.dtype, device=x.device)
        for i, block in enumerate(self.blocks):
            x = block(x)
            x += i
            x[:, 0] = x[:, 1] * 2
            table[:, i] = x.sum(1)
        x = x * 2
        x.mul_(2)
        functional.relu(x, inplace=True)
        return x + table


class WritesLater(Stack):
    """What one stage made is written to in all later ones, which have it from the wire."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        side = x * 3
        for block in self.blocks[1:]:
            x = block(x)
            side.add_(1)
            x = x + side
        return x


class ClassToken(Stack):
    """Parameters of the root, used before the first layer and after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(WIDTH))
        self.scales = nn.ParameterList(torch.zeros(()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x + self.token)
        return x * self.scales[1] + self.token


class FunctionTied(Stack):
    """The head reads the embedding's weight without calling it."""

    before: nn.Linear
    shift: Tensor

    def __init__(self) -> None:
        super().__init__(before=nn.Linear(WIDTH, WIDTH, bias=False))
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(self.before(x))
        return functional.linear(x + self.shift, self.before.weight)


class Kinds(nn.Module):
    """A layer with a table that its model reads, and that it gives away itself."""

    kinds: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kinds", torch.arange(WIDTH) * 0.5, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner(x), self.kinds, self.inner.bias


class ReadsBuffer(Stack):
    """What a layer holds is read before its call, and in the last stage."""

    before: Kinds

    def __init__(self) -> None:
        super().__init__(before=Kinds())

    def forward(self, x: Tensor) -> Tensor:
        x, kinds, bias = self.before(x + self.before.kinds)
        return super().forward(x) * self.before.kinds + kinds.exp() * bias


class TwoNames(Stack):
    """One module registered twice, and called in the first stage and in the last."""

    def __init__(self) -> None:
        both = nn.Linear(WIDTH, WIDTH)
        super().__init__(both, both)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(super().forward(self.before(x)))


class Turned(Stack):
    """What crosses is transposed, and a view that only that layout allows is taken of it."""

    def forward(self, x: Tensor) -> Tensor:
        kept = self.blocks[0](x).transpose(0, 1)
        for block in self.blocks[1:]:
            x = block(x) + kept.transpose(0, 1).view(-1).view(x.shape)
            kept = x.transpose(0, 1)
        return x


class Recomputed(Stack):
    """Checkpointing around each block, by the model."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(before=nn.Linear(WIDTH, WIDTH))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            out: Any = checkpoint(block, x, use_reentrant=self.reentrant)
            x = out * 2 if self.reentrant else out
        return x


class Asks(Stack):
    """Asks tensors and layers for what they are: devices, dtypes, attributes; hooks gradients."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            assert x.device.type == "cpu" and x.is_cpu and not x.is_meta and not x.is_cuda
            assert block.kind == "full" and block.training == self.training
            assert x.get_device() == -1
            place = torch.arange(WIDTH, device=x.device).type_as(x).expand_as(x)
            x = (x + place.to(x)).to("cpu").cpu().contiguous().float().double()
            x.register_hook(lambda g: g * 2)
        return x.to(next(self.parameters()).dtype)


class Sign(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 3
        return x.sign() * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.factor


class Straight(Stack):
    """It stands between layers."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Sign.apply(block(x))
        return x


class Experts(nn.Module):
    """Each row goes to one of two networks; how many rows each has is in the numbers."""

    def __init__(self, out: int = WIDTH) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(WIDTH, out), nn.Linear(WIDTH, out), out

    def forward(self, x: Tensor) -> Tensor:
        out, first = x.new_zeros(*x.shape[:-1], self.out), x[..., 0] > 0
        out[first] = self.a(x[first])
        if (~first).any():
            out[~first] = self.b(x[~first])
        return out


class Routed(Stack):
    """Experts between blocks, as a layer and inside of one."""

    def __init__(self, out: int = WIDTH) -> None:
        super().__init__(before=nn.Sequential(Experts(), nn.Linear(WIDTH, WIDTH)))
        self.blocks[1] = Experts(out)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.before(x))


class LateNorm(Stack):
    """A module that is defined before the blocks and called after them."""

    def __init__(self) -> None:
        super().__init__(before=nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.before(super().forward(x))


class Statistics(Stack):
    """A layer that holds no parameters, only statistics."""

    def __init__(self) -> None:
        super().__init__(after=nn.BatchNorm1d(LENGTH, affine=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(super().forward(x))


class Listed(nn.Module):
    """Layers whose children the model calls, or counts, itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*[Block() for _ in range(2)])
        self.second = nn.Sequential(*[Block() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.first:
            x = block(x)
        x = self.first[1](x) * len(self.first)
        return self.second(x) if self.second else x
