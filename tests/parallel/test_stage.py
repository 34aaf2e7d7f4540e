"""A model in stages computes what it does in one process, whatever it does between its layers."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.techniques.pipeline.trace.placeholders import twin
from tests.engine.cases import Case, regression, rows_task
from tests.engine.pipelines import SGD
from tests.engine.tensors import equals_one, holds
from tests.engine.zoo import TASKS
from tests.parallel.between import (
    LENGTH,
    WIDTH,
    Block,
    Experts,
    LateNorm,
    Stack,
    cut,
    ran,
    rows,
    settled,
    through,
)
from tests.pool import run_threads

TWO, THREE = ("blocks.2",), ("blocks.1", "blocks.3")


# --- what models do between layers ----------------------------------------------------------------


def masked(m: Any, x: Tensor) -> Tensor:
    """The first layer makes a mask for all others."""
    x, mask = m.before(x)
    for block in m.blocks:
        x = block(x) * mask
    return x


class Look(nn.Linear):
    """A value and a mask, through which no gradient flows."""

    def forward(self, input: Tensor) -> Any:  # noqa: A002  # torch's name
        x = super().forward(input)
        return x, x > 0


def writes(m: Any, x: Tensor) -> Tensor:
    """In place between layers: on what a layer made, on a part of it, on what was there before."""
    table = torch.zeros(len(x), LENGTH, WIDTH, dtype=x.dtype, device=x.device)
    for i, block in enumerate(m.blocks):
        x = block(x)
        x += i
        x[:, 0] = x[:, 1] * 2
        table[:, i] = x.sum(1)
    x = x * 2
    x.mul_(2)
    functional.relu(x, inplace=True)
    return x + table


def writes_later(m: Any, x: Tensor) -> Tensor:
    """What one stage made is written to in all later ones, which have it from the wire."""
    x = m.blocks[0](x)
    side = x * 3
    for block in m.blocks[1:]:
        x = block(x)
        side.add_(1)
        x = x + side
    return x


def class_token() -> nn.Module:
    """Parameters of the root, used before the first layer, in each stage and, from a list, last."""

    def glue(m: Any, x: Tensor) -> Tensor:
        x = x + m.token
        for block in m.blocks:
            x = block(x) * (1 + m.scales[1])
        return x + m.kept[0]

    model = Stack(glue=glue)
    model.token = nn.Parameter(torch.zeros(WIDTH))
    vars(model)["kept"] = [model.token]
    model.scales = nn.ParameterList(torch.zeros(()) for _ in range(2))
    return model


def shared_with_a_layer() -> nn.Module:
    """A parameter of the root, which its forward reads first, and a bias of the last block."""
    model = Stack(glue=lambda m, x: through(m, x * m.first))
    model.first = model.blocks[-1].get_submodule("down").bias
    return model


def tied_by_function() -> nn.Module:
    """The head reads the embedding's weight without calling it, and a buffer of the root."""

    def glue(m: Any, x: Tensor) -> Tensor:
        return functional.linear(through(m, m.before(x)) + m.shift, m.before.weight)

    model = Stack(before=nn.Linear(WIDTH, WIDTH, bias=False), glue=glue)
    model.register_buffer("shift", torch.ones(WIDTH))
    return model


class Kinds(nn.Module):
    """A layer with a table that its model reads, and that it gives away itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.kinds = nn.Buffer(torch.arange(WIDTH) * 0.5, persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x), self.kinds, self.inner.bias


def reads_buffer(m: Any, x: Tensor) -> Tensor:
    """What a layer holds is read before its call, and in the last stage."""
    x, kinds, bias = m.before(x + m.before.kinds)
    return through(m, x) * m.before.kinds + kinds.exp() * bias


def turned(m: Any, x: Tensor) -> Tensor:
    """What crosses is transposed, and a view that only that layout allows is taken of it."""
    kept = m.blocks[0](x).transpose(0, 1)
    for block in m.blocks[1:]:
        x = block(x) + kept.transpose(0, 1).view(-1).view(x.shape)
        kept = x.transpose(0, 1)
    return x


def asks(m: Any, x: Tensor) -> Tensor:
    """Asks tensors and layers for what they are: devices, dtypes, attributes; hooks gradients."""
    for block in m.blocks:
        x = block(x)
        assert x.is_meta or (x.device.type, x.is_cpu, x.is_cuda) == ("cpu", True, False)
        assert isinstance(block, Block) and type(block).__name__ == "Block"
        assert block.kind == "full" and block.training == m.training
        assert x.is_meta or x.get_device() == -1
        place = torch.arange(WIDTH, device=x.device).type_as(x).expand_as(x)
        x = (x + place.to(x)).to("cpu").cpu().contiguous().float().double()
        x.register_hook(lambda g: g * 2)
    return x.to(next(m.parameters()).dtype)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 3
        return x.sign() * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.factor


def straight(m: Any, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = Sign.apply(block(x))
    return x


def routed() -> nn.Module:
    """Experts between blocks, as a layer and inside of one; a layer without parameters."""
    before = nn.Sequential(Experts(), nn.Linear(WIDTH, WIDTH))
    after = nn.LayerNorm(WIDTH, elementwise_affine=False)
    model = Stack(before, after, lambda m, x: m.after(through(m, m.before(x))))
    model.blocks[1] = Experts()
    return model


class Listed(nn.Module):
    """Layers whose children the model calls, or counts, itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(Block(), Block()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.first:
            x = block(x)
        x = self.first[1](x) * len(self.first)
        return self.second(x) if self.second else x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mask": lambda: Stack(Look(WIDTH, WIDTH), glue=masked),
    "in place": lambda: Stack(glue=writes),
    "in place later": lambda: Stack(glue=writes_later),
    "class token": class_token,
    "tied by function": tied_by_function,
    "shared with a layer": shared_with_a_layer,
    "buffer of a layer": lambda: Stack(Kinds(), glue=reads_buffer),
    "transposed": lambda: Stack(glue=turned),
    "asks": lambda: Stack(glue=asks),
    "autograd function": lambda: Stack(glue=straight),
    "experts": routed,
    "late norm": LateNorm,
    "first block again": lambda: Stack(glue=lambda m, x: m.blocks[0](through(m, x))),
}


# --- the same as in one process -------------------------------------------------------------------

CASES = [
    *((name, plan) for name in MODELS for plan in ("pp2 gpipe:2", "pp4 1f1b:2")),
    *(
        (name, plan)
        for name in ("in place", "in place later", "class token")
        for plan in ("pp2 interleaved:2x2", "pp2 zb-v:2", "pp2 dp2 zero3 zb-v:2")
    ),
    ("listed", "pp2 gpipe:2"),
]


def made(name: str) -> nn.Module:
    return settled((MODELS | {"listed": Listed})[name]())


@pytest.mark.cases(len(CASES))
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_stages_compute_what_the_model_does(name: str, plan: str) -> None:
    """Loss and every gradient of two unlike microbatches; a rank may have several stages."""
    work = rows_task(partial(made, name), partial(rows, 5))
    equals_one(run_threads, work, Case(f"{plan} fp64", **SGD))


#: Of the zoo, what returns or keeps something else than a tensor, recomputes, shares, or freezes.
OF_THE_ZOO = [
    *(f"returns a {how}" for how in ("dataclass", "dict", "tuple")),
    *("checkpoint around", "twice", "last frozen", "dropout off in the loss", "weight by a hook"),
    "hooks in the loss",
]


@pytest.mark.parametrize("name", OF_THE_ZOO)
def test_models_of_the_zoo_in_stages(name: str) -> None:
    """Any output, recomputation by the model, one module in two places; bytes and memory too."""
    holds(run_threads, TASKS[name], Case("pp2 1f1b:2 fp64", **SGD))


# --- what a rank has ------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes in memory."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and not x.is_meta]
        self.size = max([self.size, *(x.untyped_storage().nbytes() for x in made)])
        return out


def storages() -> dict[int, int]:
    """The bytes of the storage of every tensor in memory, by its address."""
    found = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and not x.is_meta]
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}


def dropping(m: Any, x: Tensor) -> Tensor:
    """Draws random numbers, in a layer of torch's and by itself."""
    return functional.dropout(through(m, x), 0.5) + torch.rand(WIDTH)


def test_tracing_computes_nothing_and_leaves_nothing() -> None:
    """It makes nothing as large as an activation, keeps nothing alive, and moves no generator."""
    batch = rows(50)
    for make in (tied_by_function, lambda: Stack(glue=dropping)):
        stages = cut(settled(make()), TWO, [0])
        state = torch.get_rng_state()
        gc.collect()
        before = storages()
        with Largest() as largest:
            trace = stages.trace(lambda m: regression(m, batch))
        assert largest.size < batch[0].nbytes
        assert torch.equal(state, torch.get_rng_state())
        gc.collect()
        assert storages().items() <= before.items()
        assert trace.bundles


def test_a_trace_says_what_crosses() -> None:
    """What stage 0 made for stage 2 is handed on by stage 1; evaluated, it needs no gradient."""
    stages = cut(settled(MODELS["mask"]()), THREE, [0])
    shape, loss = (2, LENGTH, WIDTH), lambda m: regression(m, rows(2))
    for needed in (True, False):
        with torch.set_grad_enabled(needed):
            trace = stages.trace(loss)
            assert ran(stages, 0, rows(2)).outputs[1].requires_grad == needed
        assert [[(s.shape, s.dtype, s.requires_grad) for s in b] for b in trace.bundles] == [
            [(shape, torch.bool, False), (shape, torch.float64, needed)]
        ] * 2


class Counts(torch.overrides.TorchFunctionMode):
    met = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.met += func is torch.tanh
        return func(*args, **(kwargs or {}))


def test_a_users_hooks_and_modes_run_where_the_layer_is() -> None:
    """Once on the rank that computes the layer, on no other; a mode meets what its layers do."""
    seen, met = list[int](), list[int]()
    for stage in (0, 1):
        model, mode = settled(Stack()), Counts()
        twins = twin(model)
        hook = model.get_submodule("blocks.0").register_forward_hook
        hook(lambda *_, s=stage: seen.append(s))

        def loss(model: nn.Module, batch: Any, mode: Counts = mode) -> Tensor:
            with mode:
                return regression(model, batch)

        stages = cut(model, TWO, [stage], twins)
        trace = stages.trace(lambda m, loss=loss: loss(m, rows(2)))
        mode.met = 0
        ran(stages, stage, rows(2), trace, loss)
        met.append(mode.met)
    assert seen == [0]
    assert met == [2, 2]
