"""Bytes that a rank holds and sends, by the tables of the papers and by hand."""

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.world import World, traced
from shardwise.core import moves
from shardwise.core.model_spec import BufferShape, ModelShape, ParamShape, UnitShape
from shardwise.core.plan.plan import BUCKET_BYTES, Plan
from shardwise.core.pool_size import BUCKETS, pool_bytes
from shardwise.core.zero import ROWS, step_moves
from shardwise.engine.optimizer.elementwise import ELEMENTWISE
from shardwise.engine.spec import optimizer_shape
from shardwise.prediction.stored_bytes import ADAM, PLAIN, OptimizerShape, held_bytes
from shardwise.prediction.traffic import TrafficLine, by_kind, start_bytes, step_bytes
from shardwise.techniques.tensor.price import loss_bytes
from tests.pool import run_threads
from tests.predict.model import batch, engine, foreseen


def held(world: World, plan: str, options: dict[str, Any]) -> list[Any]:
    """Measured and predicted after each of two steps."""
    ours = engine(world, plan, **options)
    theory, found = foreseen(world.rank, plan, **options), []
    for step in range(2):
        rows = batch(ours, "gpt", step)
        ours.step(rows)
        found.append((ours.memory(), theory.of(rows).memory))
    return found


def check(found: list[list[Any]]) -> None:
    for rank in found:
        for measured, predicted in rank:
            assert measured == predicted


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_optimizer_is_known_as_numbers(name: str):
    """Whatever an elementwise class of torch.optim keeps of a parameter is predicted."""
    recipe = sw.Optim(getattr(torch.optim, name), lr=1e-3)
    check(run_threads(2, held, "dp2 zero3 bf16", {"optimizer": recipe}))


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.SGD, {}, PLAIN),
        (torch.optim.SGD, {"momentum": 0.9}, OptimizerShape(states=1, scalar_bytes=0)),
        (torch.optim.AdamW, {}, ADAM),
        (torch.optim.AdamW, {"amsgrad": True}, OptimizerShape(3, 4)),
    ],
)
def test_options_change_what_an_optimizer_keeps(
    kind: Any, options: dict[str, Any], expected: OptimizerShape
):
    """Momentum is one state tensor, AMSGrad's largest variance a third one; both are predicted."""
    recipe = sw.Optim(kind, lr=0.1, **options)
    assert optimizer_shape(recipe, [ParamShape("w", (2, 3))]) == expected
    check(run_threads(2, held, "dp2 zero2", {"optimizer": recipe}))


# GB a device of 7.5, 128 and 1000 billion parameters: os, os+g, os+g+p (ZeRO, table 1). The
# paper truncates 4187.5, 2218.75, 257.75 and 513.5; its last digit is what the tolerance allows.
TABLE_1 = {
    1: ((120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)),
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}


@pytest.mark.parametrize("n", TABLE_1)
def test_the_papers_table(n: int):
    """ZeRO's table 1: 2 + 2 + 12 bytes a parameter under each stage, for three models."""
    for billions, row in zip((7.5, 128, 1000), TABLE_1[n], strict=True):
        param = ParamShape("w", (int(billions * 1e9),), "bfloat16")
        model = ModelShape((UnitShape("all", (param,)),))
        for stage, published in zip(("zero1", "zero2", "zero3"), row, strict=True):
            plan = Plan.parse(f"dp{n} {stage} bf16")
            held = held_bytes(plan, model, ADAM)
            total = sum(held[state] for state in ("parameters", "gradients", "optimizer")) / 1e9
            assert total == pytest.approx(published, abs=1.0 if published > 200 else 0.06)


def test_buffers_are_whole_on_every_rank():
    """Buffers are not sharded."""
    param = ParamShape("w", (64,))
    model = ModelShape((UnitShape("u", (param,)),), (BufferShape("b", (3, 5), "int64"),))
    assert held_bytes(Plan.parse("dp4 zero3"), model, rank=3)["buffers"] == 120


@pytest.mark.parametrize(
    ("text", "model_bytes", "expected"),
    [
        ("dp4 zero3", 2**40, 50 * 2**20),
        ("dp1024 zero3", 2**40, 50 * 2**20),
        ("dp2 bucket:1MiB", 2**30, 2**21),
        ("dp2 tp2", 10_000, 10_240),  # of a small model as much as it has
        ("dp2 buffers:64MiB", 10_000, 2**26),
        ("dp2", 4, 1536),
        ("zero3 buffers:64MiB", 2**40, 0),
    ],
)
def test_communication_buffers_are_the_plans(text: str, model_bytes: int, expected: int):
    """A pool is no larger for a larger model or world; a single rank has none."""
    assert pool_bytes(Plan.parse(text), model_bytes) == expected


@pytest.mark.parametrize(("ranks", "row"), [(2, "ddp"), (64, "zero3")])
def test_buffers_do_not_grow_with_the_model(ranks: int, row: str):
    """A layer of 2 GiB on the meta device: the pool is what the plan says, or the default."""
    for size, pool in (("buffers:64MiB", 2**26), ("", BUCKETS * BUCKET_BYTES)):
        for width in (7328, 23170):  # a tenth of 2 GiB in fp32, and 2 GiB
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(width, width))
                x = torch.empty(1, width)
            loss = lambda model, x: model(x).square().mean()  # noqa: E731
            found = sw.predict(model, f"dp{ranks} {row} fp32 {size}", x, loss=loss)
            assert found.memory["buffers"] == pool


def lines(tally: Any) -> dict[TrafficLine, int]:
    return {TrafficLine(*key): t.sent_bytes for key, t in tally.items() if t.sent_bytes}


def differing(world: World, plan: str, kind: str, clip: float | None) -> list[Any]:
    """What one rank sent and what was predicted, where they are not the same."""
    ours = engine(world, plan, kind, clip=clip)
    theory = foreseen(world.rank, plan, kind, clip=clip)
    model = theory.of(batch(ours, kind, 0)).model
    pairs = [(lines(ours.sent()), start_bytes(ours.plan, model, world.rank))]
    for step in range(3):
        rows = batch(ours, kind, step)
        metrics = ours.step(rows)
        pairs.append((lines(ours.last), theory.of(rows).in_step(step)))
        assert metrics.bytes == sum(pairs[-1][1].values())
        assert ours.measured_bytes() == by_kind(pairs[-1][1])
    return [pair for pair in pairs if pair[0] != pair[1]]


@pytest.mark.parametrize("plan", ["dp2", "dp_replicate2 dp_shard2 zero3"])
def test_many_control_numbers_are_all_reduced(plan: str, monkeypatch: pytest.MonkeyPatch):
    """What ranks agree on in a step is predicted beyond the size up to which it is gathered too."""
    monkeypatch.setattr(moves, "GATHERED_BYTES", 100)
    assert ("dp", "all_reduce", "check") in step_bytes(Plan.parse("dp2"), plain(20))
    found = run_threads(Plan.parse(plan).size, differing, plan, "gpt", 1.0)
    assert found == [[]] * len(found)


@pytest.mark.parametrize("row", ROWS)
def test_large_worlds_send_what_is_predicted(row: str):
    """A rank of a large world, traced, sends what is predicted of it."""
    plan = f"dp1024 {row} fp64"
    ours = engine(traced(3, 1024), plan)
    started = ours.sent()
    ours.step(batch(ours, "gpt", 0))
    told = foreseen(3, plan).of(batch(ours, "gpt", 0))
    assert lines(started) == start_bytes(ours.plan, told.model, 3)
    assert lines(ours.last) == told.in_step(0)


def plain(blocks: int = 4) -> ModelShape:
    units = (UnitShape(f"b{k}", (ParamShape(f"b{k}.w", (64, 64)),)) for k in range(blocks))
    return ModelShape(tuple(units))


@pytest.mark.parametrize(("row", "volumes"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3)])
@pytest.mark.parametrize("n", [2, 4, 64])
def test_volumes_of_the_paper(row: str, volumes: int, n: int):
    """A step sends 2, 2, 2 and 3 times the model, (n-1)/n of it a rank (ZeRO, section 7)."""
    sent = step_bytes(Plan.parse(f"dp{n} {row}"), plain())
    states = sum(count for line, count in sent.items() if line.phase != "check")
    assert states == volumes * plain().numel * 4 * (n - 1) // n


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_step_moves_are_the_same_sum(row: str, microbatches: int):
    """Units used twice send what the table's own list of moves says."""
    sent = step_bytes(Plan.parse(f"dp4 {row} accumulate:{microbatches}"), plain())
    states = sum(count for line, count in sent.items() if line.phase != "check")
    steps = step_moves(ROWS[row], plain().numel, 4, microbatches)
    assert states == 4 * sum(move.sent for move in steps)


def test_a_unit_that_stays_whole_is_sent_once():
    """Where backward wants a unit at once, or does not read it, a third of its bytes are saved."""
    once = ModelShape(tuple(UnitShape(u.name, u.params, again=0) for u in plain().units))
    plan = Plan.parse("dp2 zero3")
    gather = TrafficLine("dp", "all_gather", "backward")
    assert gather in step_bytes(plan, plain()) and gather not in step_bytes(plan, once)


@pytest.mark.parametrize(
    ("positions", "ranks", "smoothing", "element_bytes", "expected"),
    [
        (512, 2, False, 4, 512 * 3 * 4),  # one of the two halves each: 2 N (n-1)/n is N
        (512, 2, True, 4, 512 * 4 * 4),
        (512, 4, False, 8, (768 + 1536) * 8),
        (5, 3, False, 4, (7 + 13) * 4),  # 20/3 and 40/3 elements, each rounded
        (0, 4, True, 4, 0),
    ],
)
def test_a_loss_sends_three_or_four_numbers_a_position(
    positions: int, ranks: int, smoothing: bool, element_bytes: int, expected: int
) -> None:
    """An all-reduce of the largest logit, then one of two sums, or of three with smoothing."""
    sent = loss_bytes(positions, ranks, smoothing=smoothing, element_bytes=element_bytes)
    assert sent == expected


def test_one_rank_sends_nothing() -> None:
    """Its columns are all of them."""
    assert loss_bytes(512, 1) == 0
