"""What engines save and others continue; whole weights for a plain model, and of rank 0 alone."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Muon

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.plan.plan import Plan
from shardwise.engine import rank_zero_weights
from shardwise.engine.optimizer.elementwise import Lion
from shardwise.engine.state import full
from shardwise.models import gpt
from shardwise.models.trainable import fill
from tests.engine import pipelines
from tests.engine.cases import (
    CONFIG,
    Case,
    Task,
    build,
    difference,
    oracle,
    ranks_of,
    refusal,
    rows_task,
    settled,
    share,
    squares,
    text,
)
from tests.engine.loops import adam, rows, steps, wrap
from tests.engine.tensors import ADAMW, full_parameters, gpt_task, mine
from tests.engine.test_unwrap import State, buffered
from tests.engine.zoo import Buffered, Gated, dims, gated
from tests.parallel import layers
from tests.pool import run_gloo, run_threads

STEPS = 5
DTypes = dict[str, torch.dtype]


def go(
    world: World, task: Task, case: Case, span: range, folder: Any
) -> tuple[list[float], dict[str, torch.Tensor], DTypes]:
    """Losses, weights and states of steps: the first ones are saved, later ones go on from them."""
    engine = build(world, task, case)
    if span.start:
        sw.load(engine, folder)
    losses = [engine.step(mine(engine, task.batch(step))).loss for step in span]
    if span.stop < STEPS:
        sw.save(engine, folder)
    assert engine.steps == span.stop
    states = {box.name: box.tensor.dtype for box in engine.boxes()}
    return losses, full_parameters(engine.flats), states


def continued(
    task: Task, options: dict[str, Any], here: str, there: str, folder: Any, first: int = 2
) -> DTypes:
    """What steps under `here` save, which steps under `there` continue as in one process."""
    alone, one, two = (Case(f"{plan} fp64", **options) for plan in ("dp1", here, there))
    [(losses, weights, _)] = run_threads(1, go, task, alone, range(STEPS), folder)
    saved = run_threads(ranks_of(here), go, task, one, range(first), folder)
    rest = range(first, STEPS)
    for own, ended, _ in run_threads(ranks_of(there), go, task, two, rest, folder):
        assert own == pytest.approx(losses[first:], rel=1e-10)
        for name, weight in ended.items():  # whole, but on a tensor axis
            if weight.shape == weights[name].shape:
                assert difference(weight, weights[name]) <= 1e-10, name
    return {name: dtype for _, _, states in saved for name, dtype in states.items()}


@pytest.mark.parametrize("dampening", [None, 0.3])
@pytest.mark.parametrize("first", [1, 2])
def test_a_parameter_that_has_had_no_gradient_is_saved_and_begins_afresh(
    first, dampening, tmp_path
):
    """Neither is missing, and none inherits a step count, or a momentum of zeros for none."""
    options: dict[str, Any] = {"options": {"lr": 0.05, "weight_decay": 0.2}}
    if dampening is not None:
        options = {"kind": SGD, "options": {"lr": 0.1, "momentum": 0.9, "dampening": dampening}}
    late = rows_task(lambda: settled(Gated()), lambda step: gated(step + 1))
    saved = continued(late, options, "dp2 zero1", "dp4 zero2", tmp_path, first)
    begun = {name.split("/", 2)[2] for name in saved if name.startswith("optim/")}
    assert not any(name.startswith("never") for name in begun)
    assert any(name.startswith("side") for name in begun) == (first == 2)


LION: dict[str, Any] = {"kind": Lion, "options": {"lr": 1e-3, "weight_decay": 0.1}}
ADAFACTOR: dict[str, Any] = {"kind": Adafactor, "options": {"lr": 0.01, "weight_decay": 0.1}}
MUON: dict[str, Any] = {"kind": Muon, "options": {"lr": 0.01, "rest": sw.Adam(lr=0.01, eps=1e-4)}}
PACKED = ["gate and up", "qkv, 6 heads, 2 for keys", "qkv, 6 heads, 1 for keys"]
#: What the table of plans does not continue: other optimizers, stages that are frozen, parameters
#: without dims, weights of which a rank has several ranges, or shares some with others.
CONTINUED = [
    (rows_task(dims), ADAMW, "dp4 zero3", "dp2 zero1"),
    (gpt_task(rows=8), LION, "dp2 zero3", "dp2 tp2 zero1"),
    (gpt_task(rows=8), LION, "pp2 1f1b:2", "zero3"),
    (gpt_task(rows=8), ADAFACTOR, "dp2", "pp2 dp2 zero1 1f1b:2"),
    (gpt_task(rows=8), ADAFACTOR, "pp2 dp2 1f1b:2", "dp4 zero3"),
    (gpt_task(rows=8), MUON, "dp1", "dp2 zero3"),
    (gpt_task(rows=8), MUON, "dp_replicate2 dp_shard2 zero1", "dp3 zero2"),
    (gpt_task("tied"), ADAMW, "pp2 dp2 zero3 1f1b:2 stages:1,1", "pp4 1f1b:4 stages:2,1,1,1"),
    (pipelines.task("half frozen"), ADAMW, "pp2 1f1b:3", "ddp"),
    (pipelines.task("half frozen"), ADAMW, "zero3", "pp2 dp2 gpipe:2"),
    *(
        (layers.task(f"packed {what}"), ADAMW, *plans)
        for what in PACKED
        for plans in (("tp2", "dp2 zero3"), ("dp2 zero3", "tp2 sp"), ("dp2 tp2 zero3", "tp2"))
    ),
]


@pytest.mark.cases(5)
@pytest.mark.parametrize(("task", "options", "here", "there"), CONTINUED)
def test_any_plan_continues_what_another_saved(
    task: Task, options: Any, here: str, there: str, tmp_path: Any
):
    """Two steps under one plan and three under another lose what five in one process do."""
    saved = continued(task, options, here, there, tmp_path)
    assert any(name.startswith("optim/") for name in saved)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_are_what_is_saved(precision: str, tmp_path: Any):
    """A 16-bit plan saves fp32 weights and moments, continues bit for bit, and into fp32."""
    one, two = Case(f"dp2 zero1 {precision}"), Case(f"dp2 zero3 {precision}")
    losses, weights, states = run_threads(2, go, Task(), one, range(STEPS), tmp_path)[0]
    assert {states[n] for n in states if n.startswith("model/")} == {torch.float32}
    run_threads(2, go, Task(), one, range(2), tmp_path)
    for own, ended, _ in run_threads(2, go, Task(), two, range(2, STEPS), tmp_path):
        assert own == losses[2:]
        assert all(torch.equal(ended[name], weights[name]) for name in weights)
    wide, *_ = run_threads(1, go, Task(), Case("fp32"), range(2, STEPS), tmp_path)[0]
    assert wide == pytest.approx(losses[2:], rel=0.02)


# --- sw.full_state_dict: what a plain module takes, on rank 0 -------------------------------------


def engine_state(world: World, shape: str, plan: str) -> State:
    task = gpt_task(shape)
    engine = build(world, task, Case(plan, **ADAMW))
    for step in range(2):
        engine.step(mine(engine, task.batch(step)))
    with torch.inference_mode():
        state = sw.full_state_dict(engine)
    assert not any(x.is_inference() for x in state.values())
    engine.step(mine(engine, task.batch(2)))  # copies: training goes on
    return state


PLANS = ["dp2 zero3", "tp2 sp", "pp2 zb-v:4", "pp2 tp2 gpipe:3", "pp2 dp2 zero3 1f1b:3"]


@pytest.mark.cases(3)
@pytest.mark.parametrize("plan", PLANS)
def test_a_plain_model_takes_the_full_state_of_an_engine(plan: str):
    """Under data, tensor, sequence and pipeline parallelism, with a tied embedding."""
    found = run_threads(Plan.parse(plan).size, engine_state, "tied", f"{plan} fp64")
    expected = oracle(gpt_task("tied"), Case(plan, steps=2, **ADAMW)).weights
    assert found[1:] == [{}] * (len(found) - 1)
    plain = gpt_task("tied").make().double()
    assert list(found[0]) == list(plain.state_dict())
    plain.load_state_dict(found[0])
    for name, p in plain.named_parameters():
        assert difference(p.detach(), expected[name]) <= 1e-10, name


def test_weights_trained_in_16_bits_are_given_in_32():
    """They are the fp32 masters: training continued from rounded weights would differ."""
    state = run_threads(2, engine_state, "untied", "dp2 zero3 bf16")[0]
    assert all(v.dtype == torch.float32 for v in state.values() if v.is_floating_point())
    assert any((v != v.bfloat16()).any() for v in state.values())


def messages(world: World, how: str) -> list[int]:
    """The sizes of what this rank receives for a full state, or sends at the start."""
    sizes: list[int] = []
    taken, sent = full.receive, rank_zero_weights.broadcast

    def receive(out: Tensor, axis: Any, source: int) -> Tensor:
        sizes.append(out.nbytes)
        return taken(out, axis, source)

    def send(x: Tensor, axis: Any) -> Tensor:
        sizes.append(x.nbytes)
        return sent(x, axis)

    start = made(world.rank, (0,)) if how == "start" else buffered()
    with pytest.MonkeyPatch.context() as patch:
        if how == "start":
            patch.setattr(rank_zero_weights, "broadcast", send)
        module = sw.FSDP(start, units=1, world=world)
        patch.setattr(full, "receive", receive)
        if how != "start":
            full.full_state_dict(module)
    return sizes


def test_one_piece_of_a_tensor_is_sent_at_a_time():
    """The largest matrix has 36 elements of 8 bytes."""
    sizes = run_gloo(2, messages, "full")[0][2:]  # after the length of the list, and the list
    assert len(sizes) > 5 and max(sizes) <= 36 * 8
    assert [max(sizes) for sizes in run_gloo(2, messages, "start")] == [36 * 8] * 2


# --- weights that rank 0 alone has, the other ranks' model being on the meta device ---------------


def made(rank: int, real: tuple[int, ...]) -> nn.Module:
    if rank in real:
        return buffered()
    with torch.device("meta"):
        return Buffered().double()


ZERO = ["FULL_SHARD", "Pipe", "DDP", "SHARD_GRAD_OP", "FULL_SHARD offload"]


def losses_of(world: World, how: str, real: tuple[int, ...]) -> tuple[list[float], bool]:
    """Of three steps; and whether parameters keep the attributes that they had before."""
    torch.set_num_threads(1)
    plain = made(world.rank, real)
    for p in plain.parameters():
        p.decays = False  # type: ignore[attr-defined]
    model = wrap(how, plain, world)
    optim, losses = adam(model), list[float]()
    for step in steps(optim):
        loss = squares(model, rows(step, 0))
        loss.backward()
        losses.append(loss.item())
    return losses, all(hasattr(p, "decays") for p in model.parameters())


@pytest.mark.cases(5)
@pytest.mark.parametrize("how", ZERO)
def test_weights_of_rank_zero_alone(how: str):
    """Parameters, tied ones, buffers train as if every rank had them; on others: refused."""
    ranks = 3 if how == "FULL_SHARD" else 2
    some = run_threads(ranks, losses_of, how, (0, 2))
    assert some == run_threads(ranks, losses_of, how, tuple(range(ranks)))
    assert all(kept for _, kept in some)
    refused = run_threads(2, lambda world: refusal(lambda: losses_of(world, how, (1,))))
    for said in refused:
        assert re.search(r"scale and \d+ more on the meta device on rank 0, and not", said)


def engine_losses(world: World, plan: str, every: bool) -> list[float]:
    torch.set_num_threads(1)
    with torch.device("cpu" if every or world.rank == 0 else "meta"):
        model = gpt.GPT(CONFIG)
    if every or world.rank == 0:
        fill(model, seed=5)
    engine = sw.parallelize(
        model, plan, world, optimizer=sw.AdamW(lr=0.01), loss=gpt.loss, tokens=gpt.tokens
    )
    own = partial(share, rank=engine.data_rank, ranks=engine.data_ranks)
    return [engine.step(own(text(step))).loss for step in range(2)]


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "plan",
    [
        *("dp2 pp2 zero3 1f1b:2", "tp2 sp", "dp2 zero3 tile:2", "dp2 zero2 offload:optim"),
        *("dp2 ddp bf16", "dp2 zero3 offload:param", "dp2 tp2 zero1"),
        "dp_replicate2 dp_shard2 zero3",
    ],
)
def test_an_engine_of_weights_of_rank_zero(plan: str):
    """Under every row, and on the axes of tensors and stages, each rank gets its part."""
    ranks = Plan.parse(plan).size
    every = run_threads(ranks, engine_losses, plan, True)
    assert run_threads(ranks, engine_losses, plan, False) == every
