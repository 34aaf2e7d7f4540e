"""What is handed over and cannot work is answered in words, before the model is changed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import shardwise as sw
from shardwise.comm.world import World, alone, traced
from shardwise.core.errors import InputError
from tests.engine.cases import regression, vectors
from tests.engine.zoo import make
from tests.pool import run_gloo

Give = Callable[[nn.Module], Any]


def give(**options: Any) -> Give:
    """Call parallelize with these arguments in place of the usual ones."""
    usual = {"plan": "bf16", "world": alone(), "loss": regression}
    return lambda model: sw.parallelize(model, **{**usual, **options})


class DeepSpeedEngine(nn.Module):
    """Another library's wrapper, by its name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class FSDPModule(DeepSpeedEngine):
    """What torch's fully_shard makes of a module's class."""


def odd(weight: Tensor) -> nn.Module:
    """A module with one unusual parameter."""
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(weight)
    return module


class Tagged(Tensor):
    """A tensor that another system laid out."""


def plain_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


BAD: dict[str, tuple[Give, str]] = {
    "a number to parallelize": (lambda _: sw.parallelize(3, "dp2", alone()), "sw.parallelize of 3"),  # type: ignore[arg-type]
    "a class to parallelize": (
        lambda _: sw.parallelize(nn.Linear, "dp2", alone()),  # type: ignore[arg-type]
        r"sw\.parallelize of Linear.*an nn\.Module instance",
    ),
    "a number to FSDP": (lambda _: sw.FSDP(3), r"sw\.FSDP of 3.*sw\.FSDP\(nn\.Linear"),  # type: ignore[arg-type]
    "a text to DDP": (lambda _: sw.DDP("x"), r"sw\.DDP of 'x'"),  # type: ignore[arg-type]
    "a number to no_sync": (lambda _: sw.no_sync(3).__enter__(), "sw.no_sync of 3"),  # type: ignore[arg-type]
    "a number to clip_grad_norm": (lambda _: sw.clip_grad_norm(3, 1.0), "sw.clip_grad_norm of 3"),  # type: ignore[arg-type]
    "a negative norm": (lambda m: sw.clip_grad_norm(sw.DDP(m), -1.0), "max_norm=-1.0"),
    "a plan that is a number": (give(plan=2), r'Plan\.parse\(2\).*"dp2 zero3"'),
    "a plan too large": (give(plan="dp2"), "which needs 2 processes"),
    "a size for a world": (give(world=2), r"world=2.*sw\.init\(\)"),
    "a size for DDP's world": (lambda m: sw.DDP(m, 2), r"world=2"),  # type: ignore[arg-type]
    "a size for FSDP's world": (lambda m: sw.FSDP(m, world=2), r"world=2"),  # type: ignore[arg-type]
    "no bucket": (lambda m: sw.DDP(m, alone(), 0), "bucket_bytes=0"),
    "a strategy that is none": (lambda m: sw.FSDP(m, 3), "sharding_strategy=3"),
    "strategies": (lambda m: sw.FSDP(m, ["FULL_SHARD"]), "sharding_strategy="),
    "units of FSDP": (lambda m: sw.FSDP(m, units=1.5), "units=1.5"),  # type: ignore[arg-type]
    "shard_size in words": (lambda m: sw.FSDP(m, shard_size="2"), "shard_size='2'"),  # type: ignore[arg-type]
    "an optimizer of torch": (
        lambda m: give(optimizer=plain_sgd(m))(m),
        r"optimizer='torch.optim.SGD'.*sw\.Optim",
    ),
    "a class of torch": (
        give(optimizer=torch.optim.RMSprop),
        r"optimizer='torch.optim.RMSprop'.*sw\.Optim",
    ),
    "an optimizer by name": (give(optimizer="adam"), r"optimizer='adam'.*sw\.AdamW\(lr=3e-4\)"),
    "a loss by name": (give(loss="mse"), "loss='mse'.*a function of model and batch"),
    "a loss that is a module": (give(loss=nn.MSELoss()), r"MSELoss\(\), a module"),
    "a loss of output and target": (give(loss=functional.mse_loss), "an output and a target"),
    "a loss of the output": (
        give(loss=lambda out: out),
        "cannot be called like this .*model and batch",
    ),
    "tokens that is a number": (give(tokens=3), "tokens=3.*a function of batch"),
    "tokens of two": (give(tokens=lambda a, b: 1), "tokens=<lambda>, which cannot be called"),  # noqa: ARG005
    "no clipping by zero": (give(clip=0), "clip=0.*None for no bound"),
    "a negative bound": (give(clip=-1.0), "clip=-1.0"),
    "no number as a bound": (give(clip=float("nan")), "clip=nan"),
    "true as a bound": (give(clip=True), "clip=True"),
    "a seed in words": (give(seed="x"), "seed='x'.*whole number from 0 to"),
    "a negative prefetch": (give(prefetch=-1), "prefetch=-1"),
    "units that fit nothing": (give(units="layers.*"), "matches no module"),
    "a fill that is a number": (give(fill=3), "fill=3.*a function of name and tensor"),
    "a fill of the tensor alone": (
        give(fill=lambda t: t),
        "fill=<lambda>, which cannot be called like this",
    ),
    "nothing to train": (lambda m: give()(m.requires_grad_(False)), "all frozen"),
    "a table of no styles": (give(table={"0": "foo"}), "foo"),
    "a fill of weights that exist": (
        give(fill=lambda _, t: t.zero_()),
        r'fill= for a .* whose weights exist.*torch\.device\("meta"\)',
    ),
    "a seed of weights that exist": (give(seed=3), "seed=3 for a .* whose weights exist"),
    "a replicated model": (
        lambda m: give()(nn.DataParallel(m)),
        r"a model that is wrapped by DataParallel already.*model\.module",
    ),
    "a replicated part": (
        lambda m: sw.DDP(nn.Sequential(nn.DataParallel(m)), alone()),
        r"whose part 0 is wrapped by DataParallel.*model\.module",
    ),
    "an engine of DeepSpeed": (
        lambda m: sw.FSDP(DeepSpeedEngine(m), world=alone()),
        r"wrapped by DeepSpeedEngine already",
    ),
    "a model sharded by torch": (
        lambda m: sw.Pipe(FSDPModule(m), world=alone()),
        "before torch's FSDP has sharded it",
    ),
    "complex weights": (
        lambda _: sw.DDP(odd(torch.zeros(2, dtype=torch.cfloat)), alone()),
        "is complex",
    ),
    "sparse weights": (
        lambda _: sw.FSDP(odd(torch.eye(2).to_sparse())),
        "of the layout sparse_coo",
    ),
    "weights of another system": (lambda _: sw.Pipe(odd(Tagged(torch.eye(2)))), "is a Tagged"),
    "rows renormed in mixed precision": (
        lambda _: give(plan="bf16")(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))),
        r"0 with max_norm=1\.0",
    ),
    "wrapped already": (lambda m: give()(sw.DDP(m, alone())), "wrapped already"),
}


def test_outputs_have_the_shape_that_others_take_them_to_have():
    """Where a stage has no outputs it gives zeros like `like`, which would be added to anything."""
    engine, (x, _) = give(plan="fp64")(make("stack")), vectors(0, rows=4)
    found = engine.outputs(lambda model: model(x), torch.zeros_like(x))
    assert found.shape == x.shape and found.any()
    with pytest.raises(InputError, match=r"shape \(4, 6\) for like=\(2,\).*zeros\(\(4, 6\)\)"):
        engine.outputs(lambda model: model(x), torch.zeros(2))


def closed(_: World) -> list[str]:
    """What an engine of a world that has been left says."""
    world = sw.init("cpu")
    engine = give(plan="dp2 fp64", world=world)(make("stack"))
    engine.step(vectors(0, rows=4))
    world.close()
    found: list[str] = []
    for act in (engine.step, engine.evaluate, lambda _: engine.boxes()):
        with pytest.raises(InputError) as caught:
            act(vectors(0, rows=4))
        found.append(str(caught.value))
    return found


def test_an_engine_of_a_closed_world_says_so():
    """Not torch's words of a group that is gone, or nothing where its messages are small."""
    for found in run_gloo(2, closed):
        assert all("after world.close()" in text for text in found)


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_work_is_refused_and_changes_nothing(what: str):
    """The error says what would do; weights, their types and their classes are what they were."""
    act, text = BAD[what]
    model, other = make("stack"), make("stack")
    with pytest.raises(InputError, match=text) as error:
        act(model)
    assert "Write instead: " in str(error.value)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in other.named_parameters()]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.dtype == q.dtype and torch.equal(p, q)


@pytest.mark.parametrize("ranks", [1, 4, 6])
def test_hybrid_sharding_needs_a_size(ranks: int):
    """A number that divides the world's."""
    world = traced(0, ranks)
    with pytest.raises(InputError) as error:
        sw.FSDP(make("stack"), "HYBRID_SHARD", world=world)
    said = str(error.value)
    assert said.startswith(f"Given: HYBRID_SHARD without shard_size in a world of {ranks}.")
    assert f'Write instead: sw.FSDP(module, "HYBRID_SHARD", shard_size={ranks}).' in said
    sw.FSDP(make("stack"), "HYBRID_SHARD", world=world, shard_size=ranks)


def engine_of(loss: Any, world: World | None = None, **options: Any) -> sw.Engine:
    return sw.parallelize(make("stack"), "fp64", world or alone(), loss=loss, **options)


class Output:
    """As of transformers: an output with a loss, where there were labels."""

    def __init__(self, loss: Tensor | None) -> None:
        self.loss = loss


class Answering(nn.Module):
    """Returns what `answer` makes of the output."""

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.answer = nn.Linear(6, 6), answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(self.inner(x))


LOSSES = {
    "a number": (lambda model, batch: regression(model, batch).item(), r"a float \("),
    "nothing": (lambda model, batch: None, r"a NoneType \(None\)"),  # noqa: ARG005
    "a loss a row": (lambda model, batch: model(batch[0]).sum(1), r"a tensor of shape \(7,\)"),
    "detached": (lambda model, batch: regression(model, batch).detach(), "a tensor without a grad"),
    "of whole numbers": (lambda model, batch: regression(model, batch).long(), "a tensor of int64"),
}


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_that_is_no_scalar_with_a_gradient_is_refused(what: str):
    """Where it is returned, with what it was; the next step, with a good loss, is as the first."""
    loss, text = LOSSES[what]
    wrong = [True]
    engine = engine_of(lambda m, b: loss(m, b) if wrong[0] else regression(m, b))
    with pytest.raises(InputError, match=f"a loss that returns {text}"):
        engine.step(vectors(0))
    wrong[0] = False
    assert engine.step(vectors(0)) == engine_of(regression).step(vectors(0))


WRAPPERS = {"engine": None, "DDP": sw.DDP, "FSDP": sw.FSDP, "Pipe": partial(sw.Pipe, chunks=2)}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_step_in_which_no_parameter_gets_a_gradient_is_refused(wrap: Any):
    """The loss depends on something else alone, so it has a gradient."""
    other = nn.Parameter(torch.ones((), dtype=torch.float64))
    loss: Any = lambda model, batch: regression(model, batch).detach() * other  # noqa: E731
    step = partial(engine_of(loss).step, vectors(0))
    if wrap is not None:
        model = wrap(nn.Sequential(nn.Linear(6, 6)).double(), world=alone())
        loss(model, vectors(0)).backward()
        step = torch.optim.SGD(model.parameters()).step
    with pytest.raises(InputError, match="in which no parameter of the model got a gradient"):
        step()


def test_a_loss_of_one_element_is_a_scalar():
    """A mean kept as a vector of one trains as the scalar does, and is evaluated as it is."""
    vector = engine_of(lambda model, batch: regression(model, batch).view(1))
    scalar = engine_of(regression)
    assert vector.step(vectors(0)) == scalar.step(vectors(0))
    assert vector.evaluate(vectors(1)) == scalar.evaluate(vectors(1))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda out: (out, out), r"a model \(Answering\) that returns a tuple without a loss"),
        (lambda _: Output(None), "that returns a Output without a loss.*labels"),
        (lambda out: out, r"a loss that returns a tensor of shape \(7, 6\)"),
        (Output, r"a loss that returns a tensor of shape \(7, 6\)"),
    ],
)
def test_a_model_that_returns_no_loss_needs_one(answer: Callable[[Tensor], Any], text: str):
    """Without loss= the model's own answer is looked at: what it gave, and what to write."""
    model = Answering(answer).double()
    engine = sw.parallelize(model, "fp64", alone())
    with pytest.raises(InputError, match=text) as error:
        engine.step(vectors(0)[0])
    assert "Write instead: loss=lambda model, batch:" in str(error.value)


def test_a_model_that_returns_its_loss_needs_none():
    """A scalar, or an output with one."""
    for answer in (Tensor.mean, lambda out: Output(out.mean())):
        engine = sw.parallelize(Answering(answer).double(), "fp64", alone())
        assert engine.step(vectors(0)[0]).tokens == 7


@pytest.mark.parametrize(
    "batch",
    [
        {"text": "a"},
        ["a", "b"],
        np.zeros((7, 6)),
        (torch.tensor(3.0), 4),
        None,
        3,
    ],
    ids=["words", "texts", "array", "numbers", "nothing", "number"],
)
def test_a_batch_without_rows_of_tensors_is_refused(batch: Any):
    """It would count for nothing, and the step would train on nothing."""
    engine = engine_of(regression)
    with pytest.raises(InputError, match=r"without a tensor that has rows .* or rows=, a function"):
        engine.step(batch)
    with pytest.raises(InputError, match="a batch without a tensor that has rows"):
        engine.evaluate(batch)


def test_what_counts_a_batch_decides_what_is_one():
    """With tokens= a batch may be anything the loss understands, as a number of the step."""
    engine = engine_of(lambda m, b: regression(m, vectors(b)), tokens=lambda _: 7)
    assert engine.step(3).loss == engine_of(regression).step(vectors(3)).loss


@pytest.mark.parametrize("count", [-1, 1.5, float("nan"), float("inf")])
def test_a_count_that_is_no_whole_number_is_refused(count: Any):
    """The share of a microbatch would be another than the mean's."""
    with pytest.raises(InputError, match="tokens, which returns"):
        engine_of(regression, tokens=lambda _: count).step(vectors(0))


@pytest.mark.parametrize("count", [7, 7.0, torch.tensor(7), np.int64(7)])
def test_a_count_may_be_a_tensor(count: Any):
    """As it comes from (targets != -100).sum()."""
    engine = engine_of(regression, tokens=lambda _: count)
    assert engine.step(vectors(0)) == engine_of(regression).step(vectors(0))


def on_meta(fill: Callable[[str, Tensor], Any]) -> sw.Engine:
    with torch.device("meta"):
        model = nn.Linear(6, 6)
    return sw.parallelize(model, "fp64", alone(), loss=regression, fill=fill)


def forgetful(name: str, tensor: Tensor, seed: int) -> Tensor:
    """Makes new weights instead of writing them."""
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))


def test_a_fill_that_fails_names_the_parameter():
    """Its own error is raised, with a note."""
    with pytest.raises(KeyError) as error:
        on_meta(lambda name, _: {}[name])
    assert error.value.__notes__ == ["in fill, for the parameter weight"]


def test_a_fill_that_writes_nothing_is_refused():
    """A tensor that is returned and not written would leave zeros for weights."""
    with pytest.raises(InputError, match="another tensor for the parameter weight"):
        on_meta(partial(forgetful, seed=1))
    on_meta(lambda _, tensor: tensor.fill_(0.5)).step(vectors(0))
