"""Experts on several ranks train as in one process, wherever they are; their grouped products."""

import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm import link_times
from shardwise.comm.transport import Pending
from shardwise.comm.world import World, traced
from shardwise.core.errors import InputError, NonFiniteError
from shardwise.core.mesh import Mesh
from shardwise.models import hf
from shardwise.models.registry import find
from shardwise.techniques.expert import dispatch
from shardwise.techniques.expert.apply import layers_of
from shardwise.techniques.expert.dispatch import Stacks, feed_forward, fits, grouped, looped
from shardwise.techniques.expert.gate import GATES
from shardwise.techniques.expert.moe_layer import ExpertPlace
from shardwise.techniques.expert.routing import GlobalBatch
from shardwise.techniques.tensor.source import table_of
from shardwise.train.metrics import step_loads
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
    return Task(partial(made, name), partial(batch, name, rows), hf.causal_loss, hf.tokens)


def made(name: str) -> nn.Module:
    return find(f"toy:{name}").build()


def batch(name: str, rows: int, step: int) -> dict[str, Tensor]:
    return find(f"toy:{name}").batch(rows, step)


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
