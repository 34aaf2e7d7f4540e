"""A model in stages computes what it does in one process, whatever it does between its layers."""

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from shardwise.models.registry import find
from shardwise.techniques.pipeline.partition import calls_of, starts
from shardwise.techniques.pipeline.staged_model import Stages
from shardwise.techniques.pipeline.trace.placeholders import twin
from tests.parallel.between import LENGTH, WIDTH, Block, Experts, LateNorm, Stack, through
from tests.parallel.playing import CPU, check, regression, rows, settled

TWO, THREE, FOUR = ("blocks.2",), ("blocks.1", "blocks.3"), ("blocks.1", "blocks.2", "blocks.3")


# --- what models do between layers ----------------------------------------------------------------


def skips(m: Any, x: Tensor) -> Tensor:
    """A U-net in outline: the outputs of the first half are added in the second."""
    kept: list[Tensor] = []
    for block in m.blocks[:2]:
        x = block(x)
        kept.append(x * 2)
    for block in m.blocks[2:]:
        x = block(torch.cat([x, kept.pop()], -1).unflatten(-1, (2, WIDTH)).sum(-2))
    return x


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
    """Parameters of the root, used before the first layer and after the last."""
    model = Stack(glue=lambda m, x: through(m, x + m.token) * m.scales[1] + m.token)
    model.token = nn.Parameter(torch.zeros(WIDTH))
    model.scales = nn.ParameterList(torch.zeros(()) for _ in range(2))
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


def recomputed(m: Any, x: Tensor, *, reentrant: bool) -> Tensor:
    """Checkpointing around each block, by the model."""
    x = m.before(x)
    for block in m.blocks:
        out: Any = checkpoint(block, x, use_reentrant=reentrant)
        x = out * 2 if reentrant else out
    return x


def asks(m: Any, x: Tensor) -> Tensor:
    """Asks tensors and layers for what they are: devices, dtypes, attributes; hooks gradients."""
    for block in m.blocks:
        x = block(x)
        assert (x.device.type, x.is_cpu, x.is_meta, x.is_cuda) == ("cpu", True, False, False)
        assert block.kind == "full" and block.training == m.training
        assert x.get_device() == -1
        place = torch.arange(WIDTH, device=x.device).type_as(x).expand_as(x)
        x = (x + place.to(x)).to("cpu").cpu().contiguous().float().double()
        x.register_hook(lambda g: g * 2)
    return x.to(next(m.parameters()).dtype)


class Sign(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 3
        return x.sign() * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.factor


def straight(m: Any, x: Tensor) -> Tensor:
    """It stands between layers."""
    for block in m.blocks:
        x = Sign.apply(block(x))
    return x


def routed() -> nn.Module:
    """Experts between blocks, as a layer and inside of one; a layer of statistics alone."""
    before = nn.Sequential(Experts(), nn.Linear(WIDTH, WIDTH))
    after = nn.BatchNorm1d(LENGTH, affine=False)
    model = Stack(before, after, lambda m, x: m.after(through(m, m.before(x))))
    model.blocks[1] = Experts()
    return model


def two_names() -> nn.Module:
    """One module registered twice, and called in the first stage and in the last."""
    both = nn.Linear(WIDTH, WIDTH)
    return Stack(both, both, lambda m, x: m.after(through(m, m.before(x))))


class Pair(NamedTuple):
    x: Tensor
    size: int


@dataclass
class Output:
    x: Tensor
    note: str = "beside it"


SPEECH: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda x: (None, [x]), lambda out: out[1][0]),
    "named tuple": (lambda x: Pair(x, 3), lambda out: out.x),
    "dict": (lambda x: {"x": x, "note": "none"}, lambda out: out["x"]),
    "dataclass": (Output, lambda out: out.x),
}


class Speaks(Block):
    """A block whose input and output are wrapped in the way `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Any) -> Any:
        wrap, unwrap = SPEECH[self.how]
        return wrap(super().forward(unwrap(x)))


def spoken(how: str) -> nn.Module:
    wrap, unwrap = SPEECH[how]
    model = Stack(glue=lambda m, x: unwrap(through(m, wrap(x))))
    for k in range(4):
        model.blocks[k] = Speaks(how)
    return model


def first_linear(glue: Any) -> nn.Module:
    return Stack(before=nn.Linear(WIDTH, WIDTH), glue=glue)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "skips": lambda: Stack(glue=skips),
    "mask": lambda: Stack(Look(WIDTH, WIDTH), glue=masked),
    "in place": lambda: Stack(glue=writes),
    "in place later": lambda: Stack(glue=writes_later),
    "class token": class_token,
    "tied by function": tied_by_function,
    "buffer of a layer": lambda: Stack(Kinds(), glue=reads_buffer),
    "two names": two_names,
    "transposed": lambda: Stack(glue=turned),
    "checkpoint": lambda: first_linear(partial(recomputed, reentrant=False)),
    "checkpoint reentrant": lambda: first_linear(partial(recomputed, reentrant=True)),
    "asks": lambda: Stack(glue=asks),
    "autograd function": lambda: Stack(glue=straight),
    "experts": routed,
    **{how: partial(spoken, how) for how in SPEECH},
}


# --- the same as in one process -------------------------------------------------------------------

CASES = [
    *((name, cut, ()) for name in MODELS for cut in (TWO, FOUR)),
    *(
        (name, FOUR, ranks)
        for name in ("skips", "in place", "in place later", "class token")
        for ranks in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])
    ),
]


@pytest.mark.cases(len(CASES))
@pytest.mark.parametrize(("model", "cut", "ranks"), CASES)
def test_stages_compute_what_the_model_does(model: str, cut: Any, ranks: Any) -> None:
    """Loss and every gradient of two unlike microbatches; a rank may have several stages."""
    check(settled(MODELS[model]()), regression, [rows(3), rows(2, seed=1)], cut, ranks)


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


def test_where_stages_begin() -> None:
    """Between modules of a Sequential, in a layer that is looked into, by the order of calls."""
    parts = [nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    model = settled(nn.Sequential(*parts, nn.Linear(8, WIDTH)))
    for count in (2, 4):
        check(model, regression, [rows(3), rows(1, seed=2)], starts(model, count))
    check(settled(Listed()), regression, [rows(3)], ("second",))
    late = settled(LateNorm())
    check(late, regression, [rows(3)], TWO, calls=calls_of(late, regression))


#: Of llama, gpt2 and t5 tests/verify/test_command.py tells.
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "phi3", "mixtral", "bert", "opt", "bart"])
def test_models_of_transformers_in_stages(name: str) -> None:
    """Skips, tied embeddings, masks, experts whose shapes are in the data."""
    pytest.importorskip("transformers")
    found = find(f"hf:{name}")
    model = found.build().double().train()
    check(model, found.loss, [found.batch(3, 0), found.batch(1, 1)], starts(model, 4))


# --- what a rank has ------------------------------------------------------------------------------


def cut(model: nn.Module, begins: tuple[str, ...], mine: list[int]) -> Stages:
    return Stages(model, twin(model), begins, mine, CPU)


def ran(stages: Stages, stage: int, batch: Any, trace: Any = None, loss: Any = regression) -> Any:
    """What a stage makes of zeros, where it has inputs."""
    trace = trace or stages.trace(lambda m: loss(m, batch))
    specs = trace.bundles[stage - 1] if stage else ()
    given = [torch.zeros(s.shape, dtype=s.dtype, requires_grad=s.requires_grad) for s in specs]
    return stages.run(stage, trace, given, lambda m: loss(m, batch))


def test_a_rank_has_its_stages_parameters_and_no_others() -> None:
    """By named_parameters, state_dict: before and after a run."""
    model = settled(class_token())
    names = [name for name, _ in model.named_parameters()]
    middle = copy.deepcopy(model)
    ran(cut(model, THREE, [0, 2]), 0, rows(2))
    right = [name for name in names if not name.startswith(("blocks.1", "blocks.2"))]
    assert [name for name, _ in model.named_parameters()] == right
    assert list(model.state_dict()) == right
    cut(middle, THREE, [1])
    assert list(middle.state_dict()) == [n for n in names if n not in right]


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


def test_a_stage_leaves_nothing_alive() -> None:
    """Its tensors go with its outputs, at once: nothing waits for the garbage collector."""
    stages, batch = cut(settled(Stack(glue=writes)), THREE, [1]), rows(50)

    def run() -> None:
        outputs = ran(stages, 1, batch).outputs
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])

    run()
    gc.collect()
    before = storages()
    gc.disable()
    run()
    found = storages()
    gc.enable()
    assert found.items() <= before.items()


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
    """How often a layer's function is called."""

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

        stages = Stages(model, twins, TWO, [stage], CPU)
        trace = stages.trace(lambda m, loss=loss: loss(m, rows(2)))
        mode.met = 0
        ran(stages, stage, rows(2), trace, loss)
        met.append(mode.met)
    assert seen == [0]
    assert met == [2, 2]
