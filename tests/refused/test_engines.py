"""What an engine, a wrapper or one of their functions is given and refuses, in one paragraph.

A row is added here, not a test.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from collections import UserDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.checkpoint.load import load
from shardwise.checkpoint.save import save
from shardwise.comm.world import World, alone, traced
from shardwise.core import S
from shardwise.core.errors import InputError, RankError
from shardwise.engine.state.box import Box
from tests.engine.cases import refusal, regression, vectors
from tests.engine.zoo import make
from tests.pool import run_gloo, run_threads

X = torch.ones(2, 3)
MOE = sw.MoE(8, 16, sw.Gate("topk", experts=4, k=2))
WORDS = torch.zeros(2, dtype=torch.long)
META = nn.Linear(1, 1, device="meta")
#: Options of sw.Loader that are refused, and states that are.
WRONG = "sampler", "batch_size", "batch_sampler", "shufle", "num_workers"
STATE = {"epoch": 0, "done": 0, "seed": 0, "batch": 2, "rows": 2}
STATES = {}, "x", *(STATE | wrong for wrong in ({"epoch": "x"}, {"epoch": -1}, {"rows": 3}))


def given(**options: Any) -> Callable[[nn.Module], sw.Engine]:
    """Call parallelize with these arguments in place of the usual ones."""
    usual = {"plan": "bf16", "world": alone(), "loss": regression}
    return lambda model: sw.parallelize(model, **{**usual, **options})


def engine_of(loss: Any = None, **options: Any) -> sw.Engine:
    return given(plan="fp64", loss=loss, **options)(nn.Linear(6, 6))


def loader(dataset: Any = X, batch: int = 2, **options: Any) -> sw.Loader:
    return sw.Loader(dataset, engine_of(), batch, **options)


class DeepSpeedEngine(nn.Sequential):
    """Another library's wrapper, by its name."""


class Tagged(Tensor):
    """A tensor that another system laid out."""


def odd(weight: Tensor) -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(weight)
    return module


#: Arguments of `parallelize`.
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"plan": 2}, r'Plan\.parse\(2\).*"dp2 zero3"'),
    ({"plan": "dp2"}, "which needs 2 processes"),
    ({"world": 2}, r"world=2.*sw\.init\(\)"),
    ({"optimizer": torch.optim.RMSprop}, r"optimizer='torch\.optim\.RMSprop'.*sw\.Optim"),
    ({"optimizer": "adam"}, r"optimizer='adam'.*sw\.AdamW\(lr=3e-4\)"),
    ({"loss": "mse"}, "loss='mse'.*a function of model and batch"),
    ({"loss": nn.MSELoss()}, r"MSELoss\(\), a module"),
    ({"loss": functional.mse_loss}, "an output and a target"),
    ({"loss": lambda out: out}, "cannot be called like this .*model and batch"),
    ({"tokens": 3}, "tokens=3.*a function of batch"),
    ({"tokens": lambda a, b: a + b}, "tokens=<lambda>, which cannot be called"),
    ({"table": "colwise"}, "table='colwise'.*a dict of pattern to style"),
    *(({"clip": bad}, f"clip={bad}.*None for no bound") for bad in (0, -1.0, float("nan"), True)),
    ({"seed": "x"}, "seed='x'.*whole number from 0 to"),
    ({"prefetch": -1}, "prefetch=-1"),
    ({"fill": 3}, "fill=3.*a function of name and tensor"),
    ({"fill": lambda t: t}, "fill=<lambda>, which cannot be called like this"),
    ({"fill": lambda _, t: t.zero_()}, r'fill= for a .* whose weights exist.*\("meta"\)'),
    ({"seed": 3}, "seed=3 for a .* whose weights exist"),
]
#: Calls with a model, which stays as it is.
MODELS: list[tuple[Callable[[nn.Module], Any], str]] = [
    *((given(**options), said) for options, said in OPTIONS),
    (lambda _: sw.parallelize(nn.Linear, "dp2", alone()), r"of Linear.*an nn\.Module instance"),
    (lambda _: sw.FSDP(3), r"sw\.FSDP of 3.*sw\.FSDP\(nn\.Linear"),
    (lambda _: sw.DDP("x"), r"sw\.DDP of 'x'"),
    (lambda _: sw.no_sync(3).__enter__(), "sw.no_sync of 3"),
    (lambda _: sw.clip_grad_norm(3, 1.0), "sw.clip_grad_norm of 3"),
    (lambda m: sw.clip_grad_norm(sw.DDP(m), -1.0), "max_norm=-1.0"),
    (lambda m: sw.DDP(m, 2), r"world=2"),
    (lambda m: sw.FSDP(m, world=2), r"world=2"),
    (lambda m: sw.DDP(m, alone(), 0), "bucket_bytes=0"),
    (lambda m: sw.FSDP(m, ["FULL_SHARD"]), "sharding_strategy="),
    (lambda m: sw.FSDP(m, units=1.5), "units=1.5"),
    (lambda m: sw.FSDP(m, shard_size="2"), "shard_size='2'"),
    (lambda m: given(optimizer=torch.optim.SGD(m.parameters()))(m), r"optim\.SGD'.*sw\.Optim"),
    (lambda m: given()(m.requires_grad_(False)), "all frozen"),
    (lambda _: given()(nn.ReLU()), "without parameters"),
    (lambda m: given()(nn.DataParallel(m)), r"that is wrapped by DataParallel.*model\.module"),
    (lambda m: sw.FSDP(nn.Sequential(DeepSpeedEngine(m))), "part 0 is wrapped by DeepSpeedEngine"),
    (lambda _: sw.DDP(odd(torch.zeros(2, dtype=torch.cfloat)), alone()), "view_as_real"),
    (lambda _: sw.FSDP(odd(torch.eye(2).to_sparse())), "of the layout sparse_coo"),
    (lambda _: sw.Pipe(odd(Tagged(torch.eye(2)))), "is a Tagged"),
    (lambda _: given()(nn.LazyLinear(2)), "weight is of a lazy layer.*with one batch first"),
    (lambda _: given()(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))), r"0 with max_norm=1\.0"),
    (lambda m: given()(sw.DDP(m, alone())), "wrapped already"),
    *(
        (
            lambda m, n=ranks: sw.FSDP(m, "HYBRID_SHARD", world=traced(0, n)),
            rf"HYBRID_SHARD without shard_size in a world of {ranks}\..*shard_size={ranks}\)\.",
        )
        for ranks in (1, 4, 6)
    ),
    *(
        (
            lambda _, wrap=wrap: wrap(nn.Linear(2, 2).half(), precision="bf16"),
            rf"sw\.{wrap.__name__}\(module\.float\(\)",
        )
        for wrap in (sw.DDP, sw.FSDP)
    ),
]


@pytest.mark.parametrize(("call", "said"), MODELS)
def test_what_cannot_work_is_refused_and_changes_nothing(call: Any, said: str):
    """The error says what would do; weights and their types are what they were."""
    model, other = make("stack"), make("stack")
    with pytest.raises(InputError, match=said) as error:
        call(model)
    assert "Write instead: " in str(error.value)
    for (name, p), (wanted, q) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert (name, p.dtype) == (wanted, q.dtype) and torch.equal(p, q)


TYPES = [
    # calls of modules, loops and other libraries, and the equivalent
    (lambda: torch.no_grad()(engine_of().step)(X), "", "engine.step(batch) outside of the block"),
    (lambda: engine_of().optimizer.step(), "", "engine.step(batch), then"),  # noqa: PLW0108
    (lambda: engine_of().optimizer.add_param_group({}), "", "sw.AdamW(lr=3e-4, groups="),
    (lambda: engine_of().optimizer.eval(), "eval() with AdamW, which has no", ""),  # noqa: PLW0108
    *(
        (lambda s=state: engine_of().optimizer.load_state_dict(s), "", "the same specification")
        for state in (None, {"param_groups": [3]})
    ),
    (lambda: sw.no_sync(engine_of().model).__enter__(), "", "accumulate:4 in the engine's plan"),
    (lambda: sw.clip_grad_norm(engine_of().model, 1.0), "", "accumulate:4 in the engine's plan"),
    # arguments of another type
    (lambda: sw.clip_grad_norm([X], 1.0), "of [tensor", "sw.clip_grad_norm(nn.Lin"),
    (lambda: sw.full_state_dict(None), "full_state_dict of None", "sw.full_state_dict(nn.Lin"),
    (lambda: sw.derive_table(None, X, 2), "derive_table of None", "sw.derive_table(nn.Lin"),
    (lambda: sw.balance_by_time(None, str, 2), "time of None", "sw.balance_by_time(nn.Lin"),
    (lambda: sw.balance_by_time(nn.Linear(1, 1), X, 2), "call=tensor", "balance_by_time(model"),
    (lambda: sw.balance_by_time(nn.Linear(1, 1), str, 0), "stages=0", "stages=2"),
    (lambda: sw.balance_by_time(META, str, 1), "on the meta device", "starts(model, stages)"),
    (lambda: sw.DDP(nn.Linear(1, 1), broadcast_buffers="no"), "'no'", "broadcast_buffers=True"),
    (lambda: sw.init("cpu", shared_memory="no"), "shared_memory='no'", "shared_memory=True"),
    (lambda: sw.load(engine_of(), "x", missing_ok="no"), "missing_ok='no'", "missing_ok=True"),
    (lambda: alone().on("dp1"), "world.on('dp1')", 'world.on(sw.Mesh.parse("dp2"))'),
    (lambda: alone().axis("dpp"), "axis='dpp'", 'axis="dp"'),
    (lambda: sw.cross_entropy(X, WORDS, label_smoothing="x"), "label_smoothing='x'", "smoothing=0"),
    (lambda: MOE(torch.ones(2, 8), torch.ones(5)), "shape (5,)", "target of shape (2,)"),
    (lambda: sw.Gate(3, experts=4), 'the gate "3"', "gate = "),
    (lambda: sw.predict(nn.Linear(3, 3), "dp2", X, rank="0"), "rank='0'", "rank=0"),
    (lambda: sw.predict(nn.Linear(3, 3), "dp2", None), "rows (NoneType)", "torch.as_tensor(batch)"),
    (lambda: engine_of().outputs(str, None), "like=None", "like=torch.zeros("),
    (lambda: engine_of().outputs(3, X), "call=3", "engine.outputs(lambda model"),
    *(
        (lambda out=out: engine_of().outputs(lambda _: out, X), "call(model)=", "(lambda model")
        for out in (None, (X, 1))
    ),
    (lambda: engine_of().outputs(lambda _: X, X.int()), "in float32 for", "dtype=torch.float32"),
    (lambda: loader(iter([])), "a list_iterator as", "utils.data.DataLoader"),
    (lambda: loader(DataLoader(X)), "a DataLoader as", "utils.data.DataLoader"),
    (lambda: loader([], drop_last=False), "of 0 rows", "a smaller batch"),
    (lambda: loader(batch=3), "of 2 rows", "drop_last=False"),
    *((partial(loader, **{name: -1}), f"'{name}': -1", "num_workers=2") for name in WRONG),
    (lambda: sw.Loader(X, alone(), 2), "engine=World", "sw.Loader(dataset, engine, 32)"),
    *((lambda state=s: loader().load_state_dict(state), "batch=2", "saved") for s in STATES),
    (lambda: sw.save(engine_of(), ""), "folder ''", '"runs/example"'),
    (lambda: sw.save(engine_of(), "a\0b"), "folder 'a", '"runs/example"'),
    (lambda: S("x"), "S with dim 'x'", "S(0)"),
]


@pytest.mark.parametrize(("call", "phrase", "instead"), TYPES)
def test_an_argument_of_another_type_is_one_paragraph(call: Any, phrase: str, instead: str):
    """Where Python or torch would raise from inside, or one rank would notice nothing."""
    with pytest.raises(InputError) as caught:
        call()
    (problem,) = caught.value.problems
    assert phrase in problem.given and instead in problem.instead


def test_names_that_do_not_exist():
    """The package suggests its nearest public name."""
    with pytest.raises(AttributeError, match="no attribute 'parallelise'") as caught:
        sw.parallelise  # noqa: B018
    assert caught.value.name == "parallelise" and "parallelize" in dir(caught.value.obj)


# --- steps ----------------------------------------------------------------------------------------


class Answering(nn.Module):
    """Returns what `answer` makes of the output."""

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.answer = nn.Linear(6, 6), answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(self.inner(x))


def answering(answer: Callable[[Tensor], Any]) -> sw.Engine:
    return sw.parallelize(Answering(answer), "fp64", alone())


def without_a_gradient(model: nn.Module, batch: Any) -> Tensor:
    """A loss whose gradient is by something else alone."""
    other = nn.Parameter(torch.ones((), dtype=torch.float64))
    return regression(model, batch).detach() * other


def wrapped_step(wrap: Any) -> None:
    """An update of a wrapped module after such a loss."""
    model = wrap(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double(), world=alone())
    without_a_gradient(model, vectors(0)).backward()
    torch.optim.SGD(model.parameters()).step()


def on_meta(fill: Callable[[str, Tensor], Any]) -> sw.Engine:
    with torch.device("meta"):
        model = nn.Linear(6, 6)
    return sw.parallelize(model, "fp64", alone(), loss=regression, fill=fill)


def stepped(loss: Any = regression, batch: Any = None, **options: Any) -> Any:
    return engine_of(loss, **options).step(vectors(0) if batch is None else batch)


NO_GRADIENT = "in which no parameter of the model got a gradient"
NO_ROWS = r"a batch without a tensor that has rows .* or rows=, a function"
ROWLESS = ({"text": "a"}, ["a"], np.zeros((7, 6)), (torch.tensor(3.0), 4), 3)
STEPS: list[tuple[Callable[[], Any], str]] = [
    *(
        (partial(stepped, lambda m, b, f=of: f(regression(m, b))), f"a loss that returns {what}")
        for of, what in (
            (Tensor.item, r"a float \("),
            (lambda _: None, r"a NoneType \(None\)"),
            (lambda x: x.repeat(7), r"a tensor of shape \(7,\)"),
            (Tensor.detach, "a tensor without a grad"),
            (Tensor.long, "a tensor of int64"),
        )
    ),
    (lambda: stepped(without_a_gradient), NO_GRADIENT),
    *(
        (partial(wrapped_step, wrap), NO_GRADIENT)
        for wrap in (sw.DDP, sw.FSDP, partial(sw.Pipe, chunks=2))
    ),
    *(
        (lambda f=answer: answering(f).step(vectors(0)[0]), f"{said}.*instead: loss=lambda model")
        for answer, said in (
            (lambda out: (out, out), r"a model \(Answering\) that returns a tuple without a loss"),
            (lambda _: SimpleNamespace(loss=None), "SimpleNamespace without a loss.*labels"),
            (lambda out: out, r"a loss that returns a tensor of shape \(7, 6\)"),
            (lambda out: SimpleNamespace(loss=out), r"returns a tensor of shape \(7, 6\)"),
        )
    ),
    *((partial(stepped, batch=batch), NO_ROWS) for batch in ROWLESS),
    (lambda: engine_of(regression).step(None), NO_ROWS),
    *(
        (lambda p=p, x=x: given(plan=p)(make("stack")).step(x), rf"has rows \(.* under {p}\.")
        for p in ("1f1b:4", "gpipe:2 accumulate:2", "accumulate:4")
        for x in (None, torch.tensor(1.0))
    ),
    (lambda: engine_of(regression).step(X.to("meta")), "on the meta device.*outside of the block"),
    (lambda: engine_of(regression).evaluate(["a"]), "a batch without a tensor that has rows"),
    *(
        (partial(stepped, tokens=lambda _, n=count: n), "tokens, which returns")
        for count in (-1, float("nan"), float("inf"), None, "x", 10**30, 10**400, X)
    ),
    (lambda: on_meta(lambda _, t: torch.ones(t.shape)), "another tensor for the parameter weight"),
    (
        lambda: engine_of().outputs(lambda model: model(vectors(0)[0]), torch.zeros(2)),
        r"shape \(7, 6\) in float64 for like=\(2,\).*zeros\(\(7, 6\), dtype=torch.float64",
    ),
]


@pytest.mark.parametrize(("call", "said"), STEPS)
def test_a_step_that_would_train_on_nothing_is_refused(call: Callable[[], Any], said: str):
    """What the user's functions, model or batch give is looked at, and named."""
    with pytest.raises(InputError, match=said):
        call()


@pytest.mark.parametrize("schedule", ["1f1b:2", "pipedream:2"])
def test_a_pipeline_whose_loss_is_cut_off_from_the_model_is_refused(schedule: str):
    """The earlier stages receive gradients of zeros, which are none."""

    def step(world: World) -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
        sw.parallelize(model, f"pp2 {schedule}", world, loss=without_a_gradient).step(vectors(0))

    with pytest.raises(RankError, match=NO_GRADIENT):
        run_threads(2, step)


@pytest.mark.parametrize("rows", [[X, X[:, 1:]], [X, X.int()]])
def test_rows_of_several_shapes_or_dtypes_are_not_gathered(rows: list[Tensor]):
    """The same paragraph on both ranks."""

    def gathered(world: World) -> str:
        engine = given(plan="dp2", world=world)(make("stack"))
        return refusal(lambda: engine.gather(rows[world.rank]))

    first, second = run_threads(2, gathered)
    assert first == second and "Given: rows of shape [" in first


def test_what_is_nearly_right_is_taken():
    """Losses of one element and of the model, counts of any type, batches that `tokens` counts."""
    plain, batch = make("stack"), vectors(0)
    answers: list[tuple[Any, Any, dict[str, Any]]] = [
        (lambda m, b: regression(m, b).view(1), batch, {}),
        *(
            (regression, batch, {"tokens": lambda _, n=count: n})
            for count in (7, 7.0, torch.tensor(7), np.int64(7))
        ),
        (lambda m, b: regression(m, vectors(b)), 0, {"tokens": lambda _: 7}),
    ]
    wanted = given(plan="fp64")(make("stack")).step(batch)
    for loss, own, options in answers:
        assert given(plan="fp64", loss=loss, **options)(make("stack")).step(own) == wanted
    for answer in (Tensor.mean, lambda out: SimpleNamespace(loss=out.mean())):
        assert answering(answer).step(UserDict(x=batch[0])).tokens == 7
    outputs = given(plan="fp64")(plain).outputs(lambda m: m(batch[0]), torch.zeros_like(batch[0]))
    assert outputs.shape == batch[0].shape and outputs.any()
    on_meta(lambda _, tensor: tensor.fill_(0.5)).step(batch)


def test_an_engine_goes_on_after_a_refused_loss():
    """The next step, with a good loss, is as the first."""
    wrong = [True]
    loss: Any = lambda m, b: None if wrong.pop() else regression(m, b)  # noqa: E731
    engine = given(plan="fp64", loss=loss)(make("stack"))
    with pytest.raises(InputError):
        engine.step(vectors(0))
    wrong += [False]
    assert engine.step(vectors(0)) == given(plan="fp64")(make("stack")).step(vectors(0))


def test_a_fill_that_fails_names_the_parameter():
    """Its own error is raised, with a note."""
    with pytest.raises(KeyError) as error:
        on_meta(lambda name, _: {}[name])
    assert error.value.__notes__ == ["in fill, for the parameter weight"]


def closed(_: World) -> list[str]:
    """What an engine of a world that has been left says."""
    world = sw.init("cpu")
    engine, batch = given(plan="dp2 fp64", world=world)(make("stack")), vectors(0, rows=4)
    engine.step(batch)
    world.close()
    return [refusal(act) for act in (lambda: engine.step(batch), engine.boxes)]


def test_an_engine_of_a_closed_world_says_so():
    """Not torch's words of a group that is gone, or nothing where its messages are small."""
    for found in run_gloo(2, closed):
        assert all("after world.close()" in text for text in found)


# --- boxes of a checkpoint ------------------------------------------------------------------------


def box(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Box:
    return Box(name, shape, (0,) * len(shape), shape, torch.ones(shape, dtype=dtype))


BOXES = [
    ([box("model/x", 4)], r"'model/x' of \(4,\) float32, which the checkpoint does not have"),
    ([box("model/w", 3, 4)], r"'model/w' of shape \(3, 4\).*saved with, \(4, 3\)"),
    ([box("model/w", 4, 3, dtype=torch.float64)], r"'model/w' in float64.*saved with, float32"),
    ([Box("model/x", (4,), (0,), (0,), torch.zeros(0))], "which the checkpoint does not have"),
    ([box(f"model/{i}", 1) for i in range(20)], "and 14 more tensors.*'model/0'.*'model/5'"),
]


@pytest.mark.parametrize(("boxes", "said"), BOXES)
def test_boxes_that_do_not_fit_are_refused(boxes: list[Box], said: str, tmp_path: Path):
    """A missing name, another shape or dtype: all that does not fit; no box is touched."""
    save(tmp_path, [box("model/w", 4, 3), box("model/b", 3)], {"step": 1}, alone())
    good = box("model/b", 3)
    good.tensor.fill_(5)
    with pytest.raises(InputError, match=f"(?s){said}"):
        load(tmp_path, [good, *boxes], alone())
    assert good.tensor.eq(5).all()


def loads(world: World, folder: Path) -> str:
    """What a rank says of a checkpoint of which rank 1 has a box of another shape."""
    return refusal(lambda: load(folder, [box("model/w", 4, 3 + world.rank)], world))


def test_what_one_rank_cannot_load_is_refused_by_all(tmp_path: Path):
    """In the same words, and none waits for ever."""
    save(tmp_path, [box("model/w", 4, 3)], {"step": 1}, alone())
    first, second = run_gloo(2, loads, tmp_path)
    assert first == second and "'model/w' of shape (4, 4)" in first
