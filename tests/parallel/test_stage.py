import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.models.registry import find
from shardwise.techniques.pipeline.partition import calls_of, starts
from shardwise.techniques.pipeline.staged_model import Stages
from shardwise.techniques.pipeline.trace.placeholders import twin
from tests.parallel import between
from tests.parallel.between import LENGTH, WIDTH, Stack
from tests.parallel.playing import CPU, check, regression, rows, settled


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products: several threads would wait for each other, and for other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


TWO, THREE, FOUR = ("blocks.2",), ("blocks.1", "blocks.3"), ("blocks.1", "blocks.2", "blocks.3")

MODELS: dict[str, Any] = {
    "skips": between.Skips,
    "mask": between.Masks,
    "in place": between.Writes,
    "in place later": between.WritesLater,
    "class token": between.ClassToken,
    "tied by function": between.FunctionTied,
    "buffer of a layer": between.ReadsBuffer,
    "two names": between.TwoNames,
    "transposed": between.Turned,
    "checkpoint": lambda: between.Recomputed(False),
    "checkpoint reentrant": lambda: between.Recomputed(True),
    "asks": between.Asks,
    "autograd function": between.Straight,
    "experts": between.Routed,
    "statistics": between.Statistics,
    **{
        how: lambda how=how: between.Speaks(how)
        for how in ("tuple", "named tuple", "dict", "dataclass")
    },
}


# --- the same as whole -----------------------------------------------------------------------


@pytest.mark.parametrize("cut", [TWO, FOUR], ids=len)
@pytest.mark.parametrize("model", MODELS)
def test_stages_compute_what_the_whole_model_does(model: str, cut: tuple[str, ...]) -> None:
    """Loss and every gradient, of two microbatches of which the last has fewer rows."""
    check(settled(MODELS[model]()), regression, [rows(3), rows(2, seed=1)], cut)


@pytest.mark.parametrize("model", ["skips", "in place", "in place later", "class token", "asks"])
@pytest.mark.parametrize("ranks", [[[0, 2], [1, 3]], [[0, 3], [1, 2]]], ids=str)
def test_a_rank_may_have_several_stages(model: str, ranks: list[list[int]]) -> None:
    """Two stages that are not neighbours, and the first with the last: each is run by itself."""
    check(settled(MODELS[model]()), regression, [rows(3), rows(2, seed=1)], FOUR, ranks)


@pytest.mark.parametrize("count", [2, 4])
def test_a_sequential_is_cut_between_its_modules(count: int) -> None:
    """Modules without parameters are done between layers; stages are by parameters."""
    layers = [nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    model = settled(nn.Sequential(*layers, nn.Linear(8, WIDTH)))
    check(model, regression, [rows(3), rows(1, seed=2)], starts(model, count))


def test_layers_may_be_looked_into() -> None:
    """What is called inside of a layer is glue that reads its parameters."""
    model = settled(between.Listed())
    check(model, regression, [rows(3)], ("second",))


def test_a_layer_is_in_the_stage_of_its_call() -> None:
    """A norm that is defined first and called last is in the last stage."""
    model = settled(between.LateNorm())
    check(model, regression, [rows(3)], TWO, calls=calls_of(model, regression))


def test_two_passes_over_a_pair_are_found() -> None:
    """A loss that concatenates its batch calls the first block again, after the last one."""

    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        policy, reference = model(torch.cat(pair)), model(torch.cat(pair)).detach()
        return (policy - reference).square().mean()

    calls = calls_of(Stack(), loss)
    assert len(calls["blocks.0"]) == 2 and calls["blocks.0"][1] > calls["blocks.3"][0]


#: Of llama, gpt2 and t5 tests/verify/test_command.py tells.
HF = ["qwen3", "gemma2", "phi3", "mixtral", "bert", "opt", "bart"]


@pytest.mark.parametrize("name", HF)
def test_models_of_transformers_in_stages(name: str) -> None:
    """Skips, tied embeddings, masks, experts whose shapes are in the data: as whole."""
    pytest.importorskip("transformers")
    found = find(f"hf:{name}")
    model = found.build().double().train()
    batches = [found.batch(3, 0), found.batch(1, 1)]
    calls = calls_of(model, found.loss)
    check(model, found.loss, batches, starts(model, 4, calls=calls), calls=calls)


# --- what a rank has -------------------------------------------------------------------------


def test_a_rank_has_its_stages_parameters_and_no_others() -> None:
    """By named_parameters, state_dict, buffers: before and after a run."""
    model = settled(between.ClassToken())
    whole_names = [name for name, _ in model.named_parameters()]
    stages = Stages(model, twin(model), THREE, [0, 2], CPU)
    right = [name for name in whole_names if not name.startswith(("blocks.1", "blocks.2"))]
    trace = stages.trace(lambda m: regression(m, rows(2)))
    stages.run(0, trace, [], lambda m: regression(m, rows(2)))
    assert [name for name, _ in model.named_parameters()] == right
    assert list(model.state_dict()) == right
    middle = copy.deepcopy(settled(between.ClassToken()))
    Stages(middle, twin(middle), THREE, [1], CPU)
    assert list(middle.state_dict()) == [n for n in whole_names if n not in right]


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


def test_following_computes_nothing_and_leaves_nothing() -> None:
    """While it runs nothing as large as an activation is made, and afterwards nothing is alive."""
    model = settled(between.FunctionTied())
    stages = Stages(model, twin(model), TWO, [0], CPU)
    batch = rows(50)
    gc.collect()
    before = storages()
    with Largest() as largest:
        trace = stages.trace(lambda m: regression(m, batch))
    assert largest.size < batch[0].nbytes
    gc.collect()
    assert storages().items() <= before.items()
    assert trace.bundles


def test_a_stage_leaves_nothing_alive() -> None:
    """Its tensors go with its outputs, at once: nothing waits for the garbage collector."""
    model, batch = settled(between.Writes()), rows(50)
    stages = Stages(model, twin(model), THREE, [1], CPU)
    trace = stages.trace(lambda m: regression(m, batch))

    def run() -> None:
        given = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in trace.bundles[0]]
        given = [x.requires_grad_() for x in given]
        outputs = stages.run(1, trace, given, lambda m: regression(m, batch)).outputs
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])

    run()
    gc.collect()
    before = storages()
    gc.disable()
    run()
    found = storages()
    gc.enable()
    assert found.items() <= before.items()


def test_following_moves_no_generator() -> None:
    """Dropout of the twin, and what the code draws itself, is drawn from a state that is undone."""

    class Draws(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5) + torch.rand(WIDTH)

    model = settled(Draws())
    stages = Stages(model, twin(model), TWO, [0], CPU)
    state = torch.get_rng_state()
    stages.trace(lambda m: regression(m, rows(2)))
    assert torch.equal(state, torch.get_rng_state())


def test_a_trace_says_what_crosses() -> None:
    """What stage 0 made for stage 2 is handed on by stage 1; a mask has no gradient."""
    model = settled(between.Masks())
    stages = Stages(model, twin(model), THREE, [1], CPU)
    trace = stages.trace(lambda m: regression(m, rows(2)))
    shape = (2, LENGTH, WIDTH)
    assert [[(s.shape, s.dtype, s.requires_grad) for s in b] for b in trace.bundles] == [
        [(shape, torch.bool, False), (shape, torch.float64, True)]
    ] * 2


def test_without_gradients_nothing_that_crosses_needs_one() -> None:
    """A model that is evaluated is traced as such."""
    model = settled(Stack())
    stages = Stages(model, twin(model), TWO, [0], CPU)
    with torch.no_grad():
        trace = stages.trace(lambda m: regression(m, rows(2)))
        ran = stages.run(0, trace, [], lambda m: regression(m, rows(2)))
    assert [spec.requires_grad for spec in trace.bundles[0]] == [False]
    assert not ran.outputs[0].requires_grad


def test_a_users_hooks_run_where_the_layer_is() -> None:
    """Once on the rank that computes the layer, on no other."""
    seen: list[str] = []
    for stage in (0, 1):
        model: Any = settled(Stack())
        twins = twin(model)
        model.blocks[0].register_forward_hook(lambda *_, s=stage: seen.append(f"rank {s}"))
        stages = Stages(model, twins, TWO, [stage], CPU)
        trace = stages.trace(lambda m: regression(m, rows(2)))
        given = [torch.zeros(s.shape, dtype=s.dtype) for s in trace.bundles[0]] if stage else []
        given = [x.requires_grad_() for x in given]
        stages.run(stage, trace, given, lambda m: regression(m, rows(2)))
    assert seen == ["rank 0"]


def test_a_users_modes_go_on_inside_of_layers() -> None:
    """A mode of torch entered around the model meets what the layers do, and ours does not."""

    class Counts(torch.overrides.TorchFunctionMode):
        met = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.met += func is torch.tanh
            return func(*args, **(kwargs or {}))

    mode = Counts()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with mode:
            return regression(model, batch)

    model = settled(Stack())
    stages = Stages(model, twin(model), TWO, [0], CPU)
    trace = stages.trace(lambda m: loss(m, rows(2)))
    mode.met = 0
    stages.run(0, trace, [], lambda m: loss(m, rows(2)))
    assert mode.met == 2
