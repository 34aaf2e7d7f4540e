"""Programs of users: what they compute on a wrapped module, or in a loss, is one process's."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm.world import World
from shardwise.techniques.data.apply import driver_of
from tests.engine.cases import difference, settled, squares
from tests.engine.loops import LOOPS, Loop, Side, adam, coder, rows, wrap
from tests.engine.zoo import Buffered, dims, make
from tests.pool import run_threads

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "one-technique.md"
FIRST = ("DDP", "FULL_SHARD")
Make = Callable[[], nn.Module]
LossOf = Callable[[Any, Tensor], Tensor]


class Aside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(6, 6), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.layer(x).square().mean()
        return x


def trains(loss_of: LossOf, passes: int = 1, *, apart: bool = False) -> Loop:
    """A loop of three steps, each of so many passes; `loss_of(model, rows)` is a mean over rows.
    With `apart`, each share has a loss of its own, of which the mean is taken.
    """

    def loop(side: Side) -> None:
        for batch in (passes * step + k for step in side.steps() for k in range(passes)):
            shares = [rows(batch, rank) for rank in side.shares]
            for share in shares if apart else [torch.cat(shares)]:
                (loss_of(side.model, share) / (len(shares) if apart else 1)).backward()

    return loop


def by_methods(model: Any, x: Tensor) -> Tensor:
    z = model.encode(x)
    return (model.leave(z) - x).square().mean() + 0.1 * z.square().mean()


def by_head(model: Any, x: Tensor) -> Tensor:
    return F.linear(model.encode(x), model.leave.weight, model.leave.bias).square().mean()


def with_term(model: Any, x: Tensor) -> Tensor:
    return squares(model, x) + 0.01 * sum(p.square().sum() for p in trained_of(model))


class Product(torch.autograd.Function):
    """A kernel that is given the weight of a layer, as fused losses are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, w = ctx.saved_tensors
        return gradients[0] @ w, gradients[0].t() @ x


def by_weight(model: Any, x: Tensor) -> Tensor:
    before = sum(p.square().sum() for p in trained_of(model))
    out: Any = Product.apply(model.encode(x), model.leave.weight)
    return out.square().mean() + 0.01 * before + 0.01 * model.leave.bias.square().sum()


def by_side(model: Any, x: Tensor) -> Tensor:
    model(x)
    return model.loss


def watched(side: Side) -> None:
    """Weights are read between backward and update; the last pass is one that nobody needs."""
    model: Any = side.model
    assert {*model.parameters()} > {model.scale, model.leave.weight}
    groups = [{"params": [model.scale], "lr": 0.1}, {"params": model.leave.parameters()}]
    nn.init.constant_(model.leave.weight, 0.3)
    for step in side.steps(optim=torch.optim.Adam(groups, lr=0.05)):
        side.backward(step)
        side.seen.append(float((model.leave.weight.norm() + model.scale.sum()).detach()))
        assert tuple(model.leave.weight.shape) == (6, 3)
        model(rows(9, 0))  # and drops the output
    side.seen.append(squares(side.model, rows(9, 0)).item())


def averaging(side: Side) -> None:
    """The recipe of docs/how-to/one-technique.md, as the page defines its functions."""
    section = PAGE.read_text().split("## An average of weights")[1]
    code = re.findall("```python\n(.*?)```", section, re.DOTALL)[0]
    page: dict[str, Any] = {"torch": torch}
    exec(code, page)  # noqa: S102
    optim = adam(side.model)
    average = {name: p.detach().clone() for name, p in side.model.named_parameters()}
    for step in range(3):
        side.backward(step)
        optim.step()
        optim.zero_grad()
        page["follow"](average, side.model, 0.5)
        with page["averaged"](average, side.model), torch.no_grad():
            side.seen.append(float(squares(side.model, rows(9, 0))))
            if driver_of(side.model):
                sw.full_state_dict(side.model)


def by_dims(side: Side) -> None:
    """The usual split: matrices decay, vectors do not; the scalar has a rate of its own."""
    named = dict(side.model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in named.values() if p.ndim == 1]},
        {"params": [p for p in named.values() if p.ndim == 0], "lr": 0.2},
    ]
    for step in side.steps(optim=torch.optim.AdamW(groups, lr=0.05, weight_decay=0.0)):
        side.backward(step)
        side.clip(0.3)


def first_states(side: Side) -> None:
    """States that an optimizer has before its first step; none is a step count."""
    for step in side.steps(optim=torch.optim.Adagrad(side.model.parameters(), lr=0.1)):
        side.backward(step)


def inferring(side: Side) -> None:
    """torch.inference_mode before each step, in both modes; one batch, which is written to."""
    side.model.register_forward_pre_hook(lambda _, args: args[0].add_(0))
    for step in side.steps():
        with torch.inference_mode():
            side.seen.append(side.model.train(step != 1)(rows(step, 0)).sum().item())
        squares(side.model.train(), rows(step, 0)).backward()


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def penalised(model: Any, x: Tensor) -> Tensor:
    """A penalty on the gradient of the rank's own loss."""
    loss = squares(model, x)
    grads = torch.autograd.grad(loss, trained_of(model), create_graph=True)
    return loss + 0.1 * torch.stack([g.square().sum() for g in grads]).sum()


# --- outputs of units in any container, changed in place or lazy ----------------------------------


class Cache:
    def __init__(self, hidden: Tensor) -> None:
        self.layers = [{"first": hidden}]

    @property
    def hidden(self) -> Tensor:
        return self.layers[0]["first"]


def plain(block: Any, x: Tensor) -> Tensor:
    return block.down(torch.tanh(block.up(x)))


def attribute(out: Any, x: Tensor) -> Tensor:
    return x + out.hidden


def in_place(out: Tensor, x: Tensor) -> Tensor:
    out += x
    out[:, :2] *= 0.5
    return out


def lazy(block: Any, x: Tensor) -> Iterator[Tensor]:
    return (plain(block, part) for part in x.chunk(3))


#: What a block returns, and how the model goes on with it.
KINDS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any, Tensor], Tensor]]] = {
    "view of a view": (lambda b, x: plain(b, x).view(-1).view(-1, 6), in_place),
    "cache": (lambda b, x: Cache(plain(b, x)), attribute),
    "set": (lambda b, x: {plain(b, x)}, lambda out, x: x + next(iter(out))),
    "generator": (lazy, lambda out, x: x + torch.cat(list(out))),
    "closure": (lambda b, x: lambda: plain(b, x), lambda out, x: x + out()),
    "weight": (lambda b, x: (plain(b, x), b.down.weight[:, :6]), lambda out, _: out[0] @ out[1]),
}


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.give = KINDS[kind][0]

    def forward(self, x: Tensor) -> Any:
        return self.give(self, x)


class Giving(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.enter, self.take = nn.Linear(6, 6), KINDS[kind][1]
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = self.take(block(x), x)
        return x


class Showing(nn.Linear):
    def forward(self, input: Tensor) -> Any:  # noqa: A002
        return super().forward(input), self.bias


def showing() -> nn.Module:
    return settled(Showing(6, 6)).double()


def giving(kind: str) -> nn.Module:
    return settled(Giving(kind)).double()


def evaluated(side: Side) -> None:
    for step in side.steps():
        with torch.no_grad():
            side.seen.append(float(squares(side.model, rows(step, 0))))
        side.backward(step)


# --- wrapped modules ------------------------------------------------------------------------------

SHARDING = ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
WAYS = ["DDP", *SHARDING, "FULL_SHARD offload"]


def zoo(name: str) -> Make:
    return lambda: make(name).double()


#: A program, its model, and its wrappers. A plain module runs it with the shares of all ranks.
PROGRAMS: dict[str, tuple[Loop, Make, list[str]]] = {
    **{name: (loop, zoo("stack"), WAYS) for name, loop in LOOPS.items()},
    "reads": (watched, coder, WAYS[:4]),
    "averages": (averaging, coder, WAYS[:4]),
    "methods": (trains(by_methods), coder, WAYS[:4]),
    "head": (trains(by_head), coder, WAYS[:4]),
    "term": (trains(with_term), coder, WAYS[:4]),
    **{how: (trains(squares), partial(coder, how), WAYS[:4]) for how in ("follows", "limits")},
    "aside": (trains(by_side, 2), lambda: settled(Aside()).double(), WAYS[:3]),
    "dims": (by_dims, dims, WAYS[:4]),
    "shared": (inferring, lambda: settled(Buffered()).double(), WAYS[:5]),
    "penalty": (trains(penalised, apart=True), zoo("sequential"), ["DDP"]),
    "vmap": (trains(lambda m, x: torch.vmap(m)(x).square().mean()), zoo("stack"), ["DDP"]),
    "frozen": (trains(squares), zoo("part of each frozen"), WAYS[:3]),
    "checkpoint": (trains(squares), zoo("checkpoint around"), WAYS[:3]),
    "first states": (first_states, dims, [*FIRST]),
    **{f"gives {kind}": (evaluated, partial(giving, kind), ["FULL_SHARD"]) for kind in KINDS},
}
ROWS = [(name, how) for name, of in PROGRAMS.items() for how in of[2]]


def on_rank(world: World, name: str, how: str) -> Any:
    """The states that the program's rank has, what it noted, and whether a unit stays gathered."""
    loop, make_plain, _ = PROGRAMS[name]
    in_units = name.startswith("gives")
    plain = make_plain()
    model = sw.FSDP(plain, units=Block, world=world) if in_units else wrap(how, plain, world)
    side = Side(model, [world.rank], world.size, True)
    loop(side)
    data = driver_of(model)
    assert data is not None
    unwatched = any(unit.state.unwatched for unit in data.units.order)
    kept, state = sw.full_state_dict(model), model.state_dict()
    return state, kept, side.seen, sw.unwrap(model).state_dict(), unwatched


def assert_program(name: str, how: str, run: Callable[..., list[Any]] = run_threads) -> None:
    """Weights and what the program noted; state_dict, full_state_dict and unwrap agree."""
    ranks = 4 if "HYBRID" in how else 2
    side = Side(PROGRAMS[name][1](), list(range(ranks)), ranks, False)
    PROGRAMS[name][0](side)
    expected = side.model.state_dict()
    found = run(ranks, on_rank, name, how)
    for rank, (state, kept, seen, unwrapped, unwatched) in enumerate(found):
        assert seen == pytest.approx(side.seen, rel=1e-10)
        assert unwatched == (name.removeprefix("gives ") in ("generator", "closure", "weight"))
        assert rank == 0 or kept == {}
        for values in (state, unwrapped, *([kept] if rank == 0 else [])):
            assert list(values) == list(expected)
            for key, value in values.items():
                assert difference(value, expected[key]) <= 1e-10, key


@pytest.mark.parametrize(
    ("name", "how"),
    [pytest.param(*row, marks=pytest.mark.core if row[1] in FIRST else ()) for row in ROWS],
)
def test_a_program_computes_what_it_does_on_a_plain_module(name: str, how: str):
    """As if all ranks' losses had been averaged."""
    assert_program(name, how)


# --- losses in an engine --------------------------------------------------------------------------

#: A loss and its model, and the rows under which an engine trains it.
LOSSES: dict[str, tuple[LossOf, Make, tuple[str, ...]]] = {
    "weight": (by_weight, coder, ("ddp", "zero1", "zero2", "zero3", "zero3 offload:param")),
    "penalty": (penalised, zoo("sequential"), ("ddp", "zero1", "zero2")),
    **{f"gives {kind}": (squares, partial(giving, kind), ("zero3",)) for kind in KINDS},
    "gives norms": (squares, partial(coder, "weighs"), ("zero2", "zero3", "zero3 offload:param")),
    "gives a bias": (lambda m, x: torch.mul(*m(x)).square().mean(), showing, ("zero3",)),
}


def trained(world: World, name: str, plan: str, inside: bool) -> tuple[list[float], Any]:
    """Three steps and evaluations, in inference mode or outside of it."""
    loss, model = LOSSES[name][0], LOSSES[name][1]()
    options: dict[str, Any] = {"units": Block} if "Block" in str(model) else {}
    options |= {"optimizer": sw.SGD(lr=0.1), "least_unit_bytes": 0}
    with torch.inference_mode(inside):
        engine = sw.parallelize(model, f"{plan} fp64", world, loss=loss, **options)
    losses = list[float]()
    for step in range(3):
        losses.append(engine.step(rows(step, engine.data_rank)).loss)
        with torch.inference_mode(inside):
            losses += [engine.evaluate(rows(9, 0))[0]] if name.startswith("gives") else []
        assert not any(unit.opened for unit in engine.data.units.order)  # what was read is freed
    return losses, sw.full_state_dict(engine)


@pytest.mark.cases(8)
@pytest.mark.parametrize(("name", "plan"), [(n, p) for n, of in LOSSES.items() for p in of[2]])
def test_a_loss_is_trained_by_an_engine_as_by_one_process(name: str, plan: str):
    """A loss that reads weights, differentiates a gradient, or goes on with any output."""
    loss, make_plain, _ = LOSSES[name]
    model, expected, inside = make_plain(), list[float](), name.startswith("gives")
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        each = [loss(model, rows(step, rank)) for rank in range(2)]
        torch.stack(each).mean().backward()
        expected.append(float(torch.stack(each).mean().detach()))
        optim.step()
        optim.zero_grad()
        if inside:
            expected.append(float(loss(model, rows(9, 0)).detach()))
    for rank, (losses, state) in enumerate(run_threads(2, trained, name, plan, inside)):
        assert losses == pytest.approx(expected, rel=1e-10)
        for key, value in model.state_dict().items() if rank == 0 else ():
            assert difference(state[key], value) <= 1e-10, key
