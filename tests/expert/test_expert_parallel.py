"""Expert parallelism under every gate, and of mixtures of transformers, as in one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World, traced
from shardwise.core.errors import InputError, NonFiniteError
from shardwise.models import hf
from shardwise.models.registry import find
from shardwise.techniques.expert.gate import GATES
from shardwise.techniques.expert.hard import hashed
from shardwise.techniques.expert.stacked import stacked_experts
from shardwise.techniques.tensor.source import table_of
from tests.engine.cases import CONFIG, Case, Task, difference, ranks_of, small_gpt
from tests.engine.tensors import (
    Held,
    assert_pieces,
    build,
    mine,
    pieces,
    train,
    whole_run,
)
from tests.expert import moe
from tests.pool import run_gloo, run_threads


@pytest.mark.cases(len(GATES))
@pytest.mark.parametrize("name", GATES)
def test_every_gate(name: str):
    """Every gate trains under ep as in one process; on threads, which takes little time."""
    moe.holds(moe.task(name, 1.0), "dp2 ep2", run_threads)


@pytest.mark.parametrize(
    ("name", "plan"),
    [("switch", "dp4 ep2 zero3"), ("sigmoid", "dp4 ep4"), ("expert-choice", "dp4 zero1")],
)
def test_ranks_without_rows(name: str, plan: str):
    """Ranks without rows take part without a token; their experts learn from the other ranks."""
    moe.holds(moe.task(name, 1.0, rows=2), plan)


def outputs(world: World, task: Task, batch: dict[str, Tensor]) -> Tensor:
    """The logits of a batch, after an evaluation in which rank 1 has no rows."""
    engine = build(world, task, Case("dp2 ep2 fp64"))
    engine.evaluate(mine(engine, moe.batch("topk", 1, 0)))
    inputs = batch["inputs"]
    like = torch.zeros(*inputs.shape, CONFIG.vocabulary, dtype=torch.float64)
    return engine.outputs(lambda model: model(inputs).logits, like)


def test_outputs_after_a_batch_without_rows():
    """Each rank sends the tokens of `outputs` to the experts, also one that just had none."""
    task, batch = moe.task("topk"), moe.batch("topk", 3, 1)
    expected = task.make().double().eval()(batch["inputs"]).logits
    for found in run_threads(2, outputs, task, batch):
        assert difference(found, expected.detach()) <= 1e-10


def test_bf16():
    """In bf16 the loss is that of one process in fp64, within their rounding."""
    task = moe.task("switch", 1.25)
    found = run_gloo(2, train, task, Case("dp2 ep2 zero3 bf16", clip=0.5))
    expected = whole_run(task, Case("dp2 ep2 zero3", clip=0.5))
    assert found[0].losses == pytest.approx(expected.losses, rel=0.02)


def saved(world: World, task: Task, plan: str, folder: str) -> None:
    engine = build(world, task, Case(f"{plan} fp64"))
    for step in range(2):
        engine.step(mine(engine, task.batch(step)))
    sw.save(engine, folder)


def continued(world: World, task: Task, plan: str, folder: str) -> Held:
    engine, held = build(world, task, Case(f"{plan} fp64", seeds=True)), Held()
    sw.load(engine, folder)
    held.losses.append(engine.step(mine(engine, task.batch(2))).loss)
    held.weights = pieces(engine.boxes(), "model/")
    return held


def test_checkpoints_between_degrees(tmp_path: Path):
    """A checkpoint of one degree is continued under another, with the biases of its gates."""
    before, after, task = "dp4 ep2 zero3", "dp4 ep4", moe.task("sigmoid")
    run_gloo(4, saved, task, before, str(tmp_path))
    found = run_gloo(4, continued, task, after, str(tmp_path))
    expected = whole_run(task, Case("dp2 fp64"))
    wanted = pytest.approx(expected.losses[2:], rel=1e-10)
    assert [held.losses for held in found] == [wanted] * 4
    assert_pieces([held.weights for held in found], expected.weights, 1e-10)


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


@pytest.mark.parametrize("gate", ["topk", "sigmoid", "gshard", "noisy-topk", "expert-choice"])
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_router_that_is_not_finite(gate: str, on_nonfinite: str):
    """Logits that are NaN on one rank stop the step on all, or all skip it, as dense models do."""
    match = r"^Step 1: The router of blocks\.0\.moe gave infinite .* data rank 1\."
    run_threads(2, one_rank_diverges, moe.task(gate), on_nonfinite, match)


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_router_of_transformers_that_is_not_finite(on_nonfinite: str):
    """So do weights that are NaN."""
    pytest.importorskip("transformers")
    match = r"^Step 1: .*layers\.0\.mlp\.experts gave .* on rank 1 of"
    run_gloo(2, one_rank_diverges, library_task("mixtral", 2), on_nonfinite, match)


@pytest.mark.parametrize(
    ("make", "plan", "given", "allowed"),
    [
        (partial(moe.model, "switch", experts=6), "dp4 ep4", "'ep4' with 6 experts", "ep2"),
        (small_gpt, "dp4 ep2", "a GPT without a layer of experts", "sw.MoE"),
    ],
)
def test_refused(make: Callable[[], nn.Module], plan: str, given: str, allowed: str):
    """A plan that the model's experts do not fit is refused before anything starts."""
    world = traced(0, ranks_of(plan))
    with pytest.raises(InputError) as error:
        sw.parallelize(make(), plan, world)
    assert given in str(error.value)
    assert allowed in str(error.value)


def test_bytes_follow_from_the_loads():
    """The all-to-alls of a step are four times the rows that leave a rank, of each layer."""
    task, case = moe.task("hash", losses=False), Case("dp2 ep2 fp64", steps=1)
    found = run_gloo(2, train, task, case)
    words = task.batch(0)["inputs"].tensor_split(2)
    second = [int((hashed(rows, 4) >= 2).sum()) for rows in words]
    leave = [second[0], words[1].numel() - second[1]]  # to the other rank's experts
    for rank, held in enumerate(found):
        sent = {key.phase: t.sent_bytes for key, t in held.lines.items() if key.axis == "ep"}
        rows = {"forward": leave[rank] + leave[1 - rank], "backward": sum(leave)}
        assert {phase: sent[phase] for phase in rows} == {
            phase: count * 2 * CONFIG.width * 8 for phase, count in rows.items()
        }


@pytest.mark.parametrize("name", ["noisy-topk", "sigmoid", "expert-choice"])
def test_gates_on_the_tensor_axis(name: str):
    """Partial gradients of routers, of shards of the sequence, are summed under each gate."""
    moe.holds(moe.task(name, 1.25), "dp2 tp2 ep2 sp", run_threads)


def test_sp_needs_the_whole_sequence():
    """Under sp a table without "gather" for a layer of experts is refused, with what to add."""
    model = moe.model("switch")
    table = table_of(model)
    lacks = replace(table, sequence=tuple(e for e in table.sequence if e[1] != "gather"))
    with pytest.raises(InputError, match=r"blocks\.\*\.moe.*gather"):
        sw.parallelize(model, "tp2 sp", traced(0, 2), table=lacks)
    assert model.get_parameter("blocks.0.moe.experts.up").shape[1] == CONFIG.hidden
    assert torch.isfinite(model.get_parameter("head.weight")).all()


def library_model(name: str) -> nn.Module:
    return find(f"hf:{name}").build()


def library_batch(name: str, rows: int, step: int) -> dict[str, Tensor]:
    return find(f"hf:{name}").batch(rows, step)


def library_task(name: str, rows: int) -> Task:
    """A small model of the type on uniform random words."""
    return Task(
        partial(library_model, name), partial(library_batch, name, rows), hf.causal_loss, hf.tokens
    )


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
    pytest.importorskip("transformers")
    moe.holds(library_task(name, rows), plan)


def test_stacks_are_found_by_their_signature():
    """The stacks of a mixture are its modules of experts; a dense model has none."""
    pytest.importorskip("transformers")
    assert list(stacked_experts(library_model("mixtral"))) == [
        f"model.layers.{n}.mlp.experts" for n in (0, 1)
    ]
    assert stacked_experts(small_gpt()) == {}
