"""Experts on several ranks train as in one process; their gates; their grouped products."""

import math
import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm import link_times
from shardwise.comm.transport import Pending
from shardwise.comm.world import World, alone, traced
from shardwise.core.errors import InputError, NonFiniteError, RunError
from shardwise.core.mesh import Mesh
from shardwise.models import hf
from shardwise.models.registry import find
from shardwise.techniques.expert import dispatch
from shardwise.techniques.expert.apply import layers_of
from shardwise.techniques.expert.dispatch import Stacks, feed_forward, fits, grouped, looped
from shardwise.techniques.expert.gate import GATES, Extra, Gate
from shardwise.techniques.expert.gates import hashed, key_of, uniform
from shardwise.techniques.expert.moe_layer import ExpertPlace, MoE
from shardwise.techniques.expert.routing import GlobalBatch, queues
from shardwise.techniques.tensor.source import table_of
from shardwise.train.config_sections import ModelSection
from shardwise.train.metrics import step_loads
from shardwise.train.model import model_sizes
from tests.engine.cases import CONFIG, Case, Task, build, difference
from tests.engine.tensors import ADAMW, holds, mine
from tests.expert import moe
from tests.pool import run_gloo, run_threads

F64 = torch.float64


def as_one(task: Task, plan: str, run: Any = run_threads) -> None:
    """Three steps, ranks begin with different weights, gradients are clipped: as one process."""
    holds(run, task, Case(f"{plan} fp64", clip=0.5, seeds=True, **ADAMW))


GATED = [
    *((name, "dp2 ep2", 7) for name in GATES),
    ("switch", "dp2 ep2 zero3", 1),  # a rank without rows, whose experts learn from the others
    *((name, "dp2 tp2 ep2 sp", 7) for name in ("noisy-topk", "sigmoid", "expert-choice")),
    *(
        pytest.param(name, f"dp2 ep2 {words}", 16, marks=pytest.mark.full)
        for name, words in (
            ("gshard", "pp2 1f1b:2"),
            ("noisy-topk", "pp2 1f1b:4 recompute:full"),
            ("sigmoid", "pp2 1f1b:4 recompute:full"),
            ("gshard", "accumulate:4 recompute:full"),
        )
    ),
    pytest.param("noisy-topk", "pp2 interleaved:4x2", 17, marks=pytest.mark.full),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("name", "plan", "rows"), GATED)
def test_every_gate(name: str, plan: str, rows: int):
    """With few rows, on the tensor axis, in stages and in recomputations too."""
    as_one(moe.task(name, 1.0, rows=rows), plan)


def library_task(name: str, rows: int) -> Task:
    pytest.importorskip("transformers")
    model = find(f"toy:{name}")
    return Task(model.build, partial(model.batch, rows), hf.causal_loss, hf.tokens)


@pytest.mark.full
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "plan", "rows"),
    [
        ("mixtral", "dp2 ep2 zero3 accumulate:2", 5),
        ("qwen3_moe", "dp4 ep4 zero3", 2),
        ("qwen2_moe", "dp2 ep2 pp2 1f1b:2", 5),
        ("deepseek_v3", "dp2 tp2 ep2", 5),
        ("gpt_oss", "dp2 ep2", 3),
        ("qwen3_moe", "dp2 tp2 ep2 sp", 5),
    ],
)
def test_experts_of_transformers(name: str, plan: str, rows: int):
    """Losses, gradients, weights and bytes are as foreseen; with 2 rows, two ranks have none."""
    as_one(library_task(name, rows), plan, run_gloo)


def outputs(world: World, task: Task, batch: dict[str, Tensor]) -> Tensor:
    """The logits of a batch, after an evaluation in which rank 1 has no rows."""
    engine = build(world, task, Case("dp2 ep2 fp64"))
    engine.evaluate(mine(engine, moe.batch("topk", 1, 0)))
    like = torch.zeros(*batch["inputs"].shape, CONFIG.vocabulary, dtype=F64)
    return engine.outputs(lambda model: model(batch["inputs"]).logits, like)


def test_outputs_after_a_batch_without_rows():
    """Each rank sends the tokens of `outputs` to the experts, also one that just had none."""
    task, batch = moe.task("topk"), moe.batch("topk", 3, 1)
    expected = task.make().double().eval()(batch["inputs"]).logits
    for found in run_threads(2, outputs, task, batch):
        assert difference(found, expected.detach()) <= 1e-10


def one_rank_diverges(world: World, task: Task, on_nonfinite: str, match: str) -> None:
    """The embedding of one token is NaN, and only rank 1 reads it."""
    options = {"loss": task.loss, "on_nonfinite": on_nonfinite, "optimizer": sw.SGD(lr=0.1)}
    engine = sw.parallelize(task.make(), "dp2 ep2 fp64", world, **options)
    with torch.no_grad():
        for name, p in engine.model.named_parameters():
            if name.endswith(("embed.weight", "embed_tokens.weight")):
                p[36] = torch.nan
    tokens = torch.full((2, 9), 36 if world.rank else 3)
    batch = {"inputs": tokens, "targets": tokens}
    if on_nonfinite == "raise":
        with pytest.raises(NonFiniteError, match=match):
            engine.step(batch)
        return
    before = [p.clone() for p in engine.model.parameters()]
    assert engine.step(batch).skipped
    engine.wait()
    pairs = zip(before, engine.model.parameters(), strict=True)
    assert all(torch.equal(b.nan_to_num(), p.nan_to_num()) for b, p in pairs)
    tokens.fill_(3)
    assert not engine.step(batch).skipped


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("gate", ["topk", "sigmoid", "gshard", "expert-choice", ""])
def test_a_router_that_is_not_finite(gate: str, on_nonfinite: str):
    """Logits that are NaN on one rank stop the step on all, or all skip it, as dense models do."""
    match = r"^Step 1: The router of blocks\.0\.moe gave infinite .* data rank 1\."
    task = moe.task(gate) if gate else library_task("mixtral", 2)
    match = match if gate else r"^Step 1: .*layers\.0\.mlp\.experts gave .* on ep rank 1"
    run_threads(2, one_rank_diverges, task, on_nonfinite, match)


def test_a_plan_that_does_not_fit_is_refused():
    """Experts that ranks cannot share; under sp a table without "gather" for their layer."""
    with pytest.raises(InputError, match=r"'ep4' with 6 experts.*ep2"):
        sw.parallelize(moe.model("switch", experts=6), "dp4 ep4", traced(0, 4))
    table = table_of(model := moe.model("switch"))
    lacks = replace(table, sequence=tuple(e for e in table.sequence if e[1] != "gather"))
    with pytest.raises(InputError, match=r"blocks\.\*\.moe.*gather"):
        sw.parallelize(model, "tp2 sp", traced(0, 2), table=lacks)
    assert model.get_parameter("blocks.0.moe.experts.up").shape[1] == CONFIG.intermediate_size


# --- gates that change with each pass -------------------------------------------------------------


def most_kept(world: World, words: str) -> tuple[int, int]:
    """The most passes that a layer keeps in a step, and those after it."""
    engine = build(world, moe.task("sigmoid", 1.0, rows=8), Case(f"dp2 ep2 {words} fp64"))
    layers = list(layers_of(engine.model).values())
    seen: list[int] = []
    for each in layers:
        records = each.pass_records
        each.register_forward_hook(lambda *_, r=records: seen.append(len(r.values)))
    for step in range(2):
        engine.step(moe.batch("sigmoid", 4, step))
    loads = step_loads(engine)
    assert 0 < (loads.dropped or 0.0) < 1
    assert 0.1 < (loads.entropy or 0.0) < 1.39  # nats: less than ln 4
    return max(seen), sum(len(each.pass_records.values) for each in layers)


def test_only_passes_that_are_recomputed_are_kept():
    """A layer keeps a step's biases while they may be repeated, and none afterwards."""
    assert run_threads(2, most_kept, "accumulate:4") == [(0, 0)] * 2
    assert run_threads(2, most_kept, "accumulate:4 recompute:full") == [(4, 0)] * 2


# --- overlap, and products ------------------------------------------------------------------------


class Noted(nn.Module):
    """Calls `inner`, and writes down when its forward and its backward pass run."""

    def __init__(self, name: str, events: list[str], inner: nn.Module) -> None:
        super().__init__()
        self.name, self.events, self.inner = name, events, inner

    def forward(self, *args: Any) -> Tensor:
        self.events.append(self.name)
        made = self.inner(*args)
        made.register_hook(lambda _: self.events.append(f"{self.name} backward"))
        return made


def shared_by_two(world: World) -> list[str]:
    """What happens on a rank in a forward and a backward pass."""
    axis, events = world.on(Mesh((("dp", 2),))).axis("dp"), list[str]()
    layer = sw.MoE(6, 5, sw.Gate("topk", 4, 2), nn.Linear(6, 6))
    for name, p in layer.experts.named_parameters():
        setattr(layer.experts, name, nn.Parameter(p.detach().chunk(2)[world.rank].clone()))
    layer.place = ExpertPlace(GlobalBatch((axis,)), axis, (0, 1))
    for name in ("experts", "shared"):
        setattr(layer, name, Noted(name, events, layer.get_submodule(name)))
    begin = link_times.begin_all_to_all

    def noted(x: Tensor, on: Any, *counts: Any) -> Pending[Tensor]:
        pending = begin(x, on, *counts)
        events.append("begin")
        return Pending([lambda: events.append("wait"), pending.wait])

    with patch.object(link_times, "begin_all_to_all", noted):
        layer(torch.randn(4, 6, requires_grad=True))[0].sum().backward()
    return events


def test_shared_experts_run_while_rows_are_under_way():
    """Forward and backward, what all tokens share is computed between begin and wait."""
    forward = ["begin", "shared", "wait", "experts", "begin", "wait"]
    backward = ["begin", "wait", "experts backward", "begin", "shared backward", "wait"]
    assert run_gloo(2, shared_by_two) == [[*forward, *backward]] * 2


COUNTS = [3, 0, 5, 1, 0, 0, 7, 2]
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def stacks_of(dtype: torch.dtype, width: int = 24, hidden: int = 40) -> tuple[Tensor, Stacks]:
    """Rows for eight experts, three of them without any, and their weights."""
    draw, n = torch.Generator().manual_seed(0), len(COUNTS)
    shapes = (sum(COUNTS), width), (n, hidden, width), (n, hidden, width), (n, width, hidden)
    rows, gate, up, down = (
        (torch.randn(*s, generator=draw) * s[-1] ** -0.5).to(dtype).requires_grad_() for s in shapes
    )
    return rows, (gate, up, down)


def needs(dtype: torch.dtype) -> None:
    if not dispatch.has_grouped_products("cpu", dtype):
        pytest.skip("this torch has no grouped products of the dtype on a processor")


@pytest.mark.parametrize("dtype", BOUNDS)
def test_grouped_products_are_those_of_a_loop(dtype: torch.dtype):
    """Outputs and gradients; of a broadcast gradient, and of no rows at all, which are zeros."""
    needs(dtype)
    rows, stacks = stacks_of(dtype)
    one, other = (of(rows, COUNTS, stacks) for of in (grouped, looped))
    slope = torch.linspace(-1, 1, rows.numel()).view_as(rows).to(dtype)
    for gradient in (torch.ones((), dtype=dtype).expand_as(rows), slope):
        found, expected = (
            torch.autograd.grad(y, [rows, *stacks], gradient, retain_graph=True)
            for y in (one, other)
        )
        for a, b in zip((one.detach(), *found), (other.detach(), *expected), strict=True):
            assert float((a - b).abs().max()) <= BOUNDS[dtype] * float(b.abs().max())
        assert not found[1][1].any()
    feed_forward(rows[:0], [0] * len(COUNTS), stacks).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in stacks)


def test_which_products_are_grouped():
    """Not of few experts, fp64, unaligned widths, tensors without data."""
    needs(torch.float32)
    rows, (gate, up, down) = stacks_of(torch.float32)
    assert fits(rows, (gate, up, down))
    assert not fits(rows, (gate[:4], up[:4], down[:4]))
    assert not fits(*stacks_of(F64))
    assert not fits(*stacks_of(torch.float32, width=23))
    assert not fits(*stacks_of(torch.float32, hidden=39))
    assert not fits(rows.to("meta"), (gate, up, down))


def test_the_example_of_more_experts_runs(monkeypatch: Any, capsys: Any):
    """From 4 to 64 experts, examples/expert_growth.py measures each."""
    monkeypatch.setattr("sys.argv", ["expert_growth.py", "64"])
    example = Path(__file__).parents[2] / "examples" / "expert_growth.py"
    runpy.run_path(str(example), run_name="__main__")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [int(line[0]) for line in lines] == [4, 16, 64]
    assert lines[0][-1] == "1.00"


# --- gates ----------------------------------------------------------------------------------------

ALONE = GlobalBatch()


def logits_of(tokens: int, experts: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, generator=draw, dtype=F64)


@given(
    st.integers(0, 12), st.integers(1, 3), st.integers(1, 5), st.sampled_from([None, 1.0, 1.25, 2])
)
@settings(max_examples=40, deadline=None)
def test_queues(n: int, k: int, experts: int, factor: float | None):
    """First choices of all tokens go before second ones, and what is beyond capacity is dropped."""
    draw = torch.Generator().manual_seed(100 * n + 10 * k + experts)
    chosen = torch.randint(experts, (n, k), generator=draw)
    wanted = torch.rand(n, k, generator=draw) < 0.8
    found = queues((chosen, wanted), logits_of(n, experts), factor, ALONE)
    length, capacity = [0] * experts, math.ceil((factor or 1e9) * n * k / experts)
    expected = [[-1] * k for _ in range(n)]
    for slot, t in ((slot, t) for slot in range(k) for t in range(n) if wanted[t, slot]):
        e = int(chosen[t, slot])
        expected[t][slot] = length[e] if length[e] < capacity else -1
        length[e] += 1
    assert found.positions.tolist() == expected
    assert found.loads.tolist() == [[min(x, capacity) for x in length]]
    assert found.wanted_by_choice.sum(0).tolist() == length
    assert found.dropped == sum(max(0, x - capacity) for x in length)


def test_bias_balances_the_load():
    """Updated after each step, the bias brings a layer that prefers one expert to an even load."""
    logits = logits_of(400, 4) + torch.tensor([3.0, 0.0, 0.0, 0.0], dtype=F64)
    layer, wanted = MoE(4, 4, Gate("sigmoid", 4, 1), bias_rate=0.01).double(), list[Tensor]()
    assert layer.router is not None
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4))
        for _ in range(300):
            layer(logits)
            wanted.append(layer.get_buffer("choices").clone())
    assert wanted[0].max() > 250
    assert wanted[-1].max() < 1.2 * 100


def test_hashes_and_random_numbers_are_uniform():
    """Token ids spread evenly over experts, and random numbers from 0 to 1."""
    counts = hashed(torch.arange(8000), 8).bincount(minlength=8)
    assert counts.min() > 850
    assert counts.max() < 1150
    found = uniform(torch.arange(4000), key_of(0, "blocks.0.moe"), 0)
    assert abs(float(found.mean()) - 0.5) < 0.02
    assert abs(float(found.var()) - 1 / 12) < 0.005


def layer(name: str, seed: int = 0) -> sw.MoE:
    torch.manual_seed(0)
    return sw.MoE(8, 8, sw.Gate(name, experts=4, k=2), seed=seed)


@pytest.mark.parametrize("name", ["gshard", "noisy-topk"])
def test_each_pass_layer_and_seed_draws_other_numbers(name: str):
    """Whatever torch's seed; a loaded layer goes on, and layers of one seed differ by name."""
    x, first = torch.randn(64, 8), layer(name)
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        made.append(first(x)[0].detach())
    loaded = layer(name)
    assert torch.equal(made[0], loaded(x)[0])
    made.append(layer(name, seed=1)(x)[0])
    again = layer(name)
    again.load_state_dict(loaded.state_dict())
    assert torch.equal(made[1], again(x)[0])
    model = nn.ModuleDict({key: layer(name) for key in ("a", "b")})
    loss = lambda m, x: m["a"](x)[0].sum() + m["b"](x)[0].sum()  # noqa: E731
    for key in ("a", "b"):
        model[key].register_forward_hook(lambda *args: made.append(args[2][0].detach()))
    sw.parallelize(model, "", alone(), optimizer=sw.AdamW(lr=0.0), loss=loss).step(x)
    assert not any(torch.equal(made[a], made[b]) for a in range(5) for b in range(a))


def test_the_seed_of_a_run_is_that_of_its_gates():
    """`train.seed` reaches every layer of experts of the model."""
    sizes = model_sizes(ModelSection(experts=4, gate="gshard"), 256, seed=7)
    with torch.device("meta"):
        layers = layers_of(sizes.build())
    assert [each.seed for each in layers.values()] == [7] * len(layers)


@pytest.mark.parametrize("name", ["gshard", "sigmoid"])
def test_other_recomputation_is_refused(name: str):
    """torch.utils.checkpoint cannot repeat such a pass, and the error says what to write."""
    own, x = layer(name), torch.randn(6, 8, requires_grad=True)
    made: Any = checkpoint(lambda x: own(x)[0], x, use_reentrant=False)
    with pytest.raises(RunError, match="the plan word recompute"):
        made.sum().backward()


# --- refused --------------------------------------------------------------------------------------

NAN = math.nan
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"k": 5}, r"k=5 with 4 experts.*Write instead: k=4, or experts=5"),
    ({"k": 1.5}, r"k=1\.5.*k=2"),
    ({"name": "switch", "k": 2}, r'k=2 under the gate switch.*sw\.Gate\("switch"'),
    ({"name": "hash", "losses": {"z": 1.0}}, r"losses = \{'z': 1.0\} under the gate hash"),
    *(({"capacity": c}, r"capacity = .*Write instead: capacity = 1\.25") for c in (0.5, NAN)),
    ({"losses": {"balanc": 1.0}}, r'the loss "balanc".*balance'),
    *(({"experts": e}, f"experts={e!r}.*Write instead: experts=8") for e in ("4", 0)),
]
LAYERS: list[tuple[tuple[Any, ...], str]] = [
    ((0, 8), "width=0"),
    ((8, 2.5), r"hidden=2\.5"),
    ((8, 8, "topk"), "the gate 'topk'"),
    ((8, 8, Gate("topk", 4), None, 0.1), r"bias_rate = 0\.1 under the gate topk, which has no"),
    ((8, 8, Gate("gshard", 4), None, 1e-3, -1), "seed=-1"),
]
REFUSED: list[tuple[Any, str]] = [
    *((lambda o=o: Gate(**({"name": "topk", "experts": 4} | o)), said) for o, said in OPTIONS),
    *((lambda a=a: MoE(*a, *[Gate("topk", 4)][: len(a) < 3]), said) for a, said in LAYERS),
    (lambda: Gate("hash", 4).route(logits_of(2, 4), ALONE), "without the expert of each token"),
    *(
        (
            lambda t=t: Gate("assigned", 4).route(logits_of(2, 4), ALONE, Extra(target=t)),
            "integers from 0 to 3, for 4 experts",
        )
        for t in (torch.tensor([0, 4]), torch.tensor([-1, 2]))
    ),
]


@pytest.mark.cases(len(REFUSED))
@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_refused(call: Any, said: str):
    """A gate or layer that cannot work, and experts that do not exist, with what to write."""
    with pytest.raises(InputError, match=said):
        call()


def assigned_wrongly(world: World, wrong: Tensor) -> None:
    """Only rank 1 is given experts that do not exist."""
    layer = MoE(8, 8, Gate("assigned", 4))
    batch = GlobalBatch((world.on(Mesh.parse("dp2")).axis("dp"),))
    layer.place = replace(layer.place, batch=batch, name="blocks.3.moe")
    with pytest.raises(InputError, match=r"blocks\.3\.moe, .* on data rank 1\."):
        layer(torch.randn(3, 8), wrong if world.rank else torch.tensor([0, 3, 1]))


def test_experts_of_one_rank_that_do_not_exist():
    """An assignment that one rank cannot use is an error on all, with the layer and the rank."""
    wrong: list[list[float]] = [[4, 0, -1], [0, -2, 1], [0.0, NAN, 2.0]]
    for target in wrong:
        run_threads(2, assigned_wrongly, torch.tensor(target))
