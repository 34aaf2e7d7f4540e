"""A step whose loss or gradient is not finite: raised by all ranks at once, before any update."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import NonFiniteError
from shardwise.engine.checks import guard
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer import updating
from shardwise.engine.options import EngineOptions
from shardwise.engine.predict import Predictor
from shardwise.prediction.traffic import TrafficLine
from tests.engine.cases import ranks_of, regression, text, vectors
from tests.engine.pipelines import deep
from tests.engine.tensors import ADAMW, Case, build, gpt_task, mine
from tests.pool import run_gloo, run_threads

#: Rows, hybrid sharding, accumulation, stages, a tensor axis, schedules that update by themselves.
PLANS = [
    *("dp2 fp64", "dp2 zero1 fp64", "dp2 zero2 accumulate:2 fp64", "dp2 zero3 fp64"),
    *("dp_replicate2 dp_shard2 zero3 fp64", "pp2 1f1b:4 fp64", "pp2 dp2 zero2 gpipe:2 fp64"),
    *("pp2 zb-h1:4 fp64", "pp2 interleaved:4x2 zero3 dp2 fp64"),
]
#: On the tensor axis only one rank holds the columns with the bad gradient; the loss is one.
TABLE = {"2": "colwise", "4": "rowwise"}
STALE = ["pp2 2bw:4 fp64", "tp2 pp2 2bw:4 fp64", "pp2 pipedream:4 fp64", "pp2 dp2 zero1 2bw:4 fp64"]
#: What is not finite: the loss itself, or one parameter's gradient alone.
KINDS = ["loss", "gradient"]
BAD = 2  # the step, counted from 0
HURT = "2.weight"


def engine_of(world: World, plan: str, rank: int, kind: str, **options: Any) -> Engine:
    """An engine whose loss, or one gradient, is not finite on one rank in the step `BAD`."""
    model = deep()
    engines: list[Engine] = []

    def now() -> bool:
        return world.rank == rank and engines[0].steps == BAD

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return regression(module, batch) * (float("nan") if kind == "loss" and now() else 1.0)

    options = {"optimizer": sw.AdamW(lr=0.01), "units": 1} | options
    options |= {"table": TABLE} if "tp" in plan else {}
    engines.append(sw.parallelize(model, plan, world, loss=loss, **options))
    hurt = dict(engines[0].model.named_parameters()).get(HURT)  # which one stage has
    if kind == "gradient" and hurt is not None:
        hurt.register_hook(lambda g: g * float("inf") if now() else g)
    return engines[0]


def state_of(engine: Engine) -> list[Tensor]:
    """Weights and optimizer state of this rank."""
    return [box.tensor.clone() for box in engine.boxes()]


def stepped(engine: Engine, step: int) -> sw.Metrics:
    return engine.step(mine(engine, vectors(step, rows=16)))


def refused(world: World, plan: str, rank: int, kind: str, clip: float | None) -> tuple[str, bool]:
    """What every rank raises in the bad step, and whether it left all as it was."""
    engine = engine_of(world, plan, rank, kind, clip=clip)
    for step in range(BAD):
        stepped(engine, step)
    before = state_of(engine)
    with pytest.raises(NonFiniteError) as caught:
        stepped(engine, BAD)
    engine.wait()
    same = all(map(torch.equal, before, state_of(engine)))
    return str(caught.value), same


def check(plan: str, kind: str, clip: float | None, run: Callable[..., Any] = run_threads) -> None:
    """The last rank's fault is raised by all ranks in the same words, and nothing has changed."""
    ranks = ranks_of(plan)
    last = ranks - 1 if kind == "loss" or "pp" not in plan else 0  # where the stage with HURT is
    found = run(ranks, refused, plan, last, kind, clip)
    assert len({said for said, _ in found}) == 1
    said = found[0][0]
    what = "the loss is not finite" if kind == "loss" else "the gradient"
    assert said.startswith(f"Step {BAD + 1}: {what}") and f"on rank {last}" in said
    assert "the first parameter with a non-finite gradient is " in said
    if kind == "gradient":
        assert f"is {HURT}" in said
    assert all(same for _, same in found)


@pytest.mark.crossed
@pytest.mark.cases(4)
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(
    ("plan", "kind"),
    [*((plan, kind) for plan in PLANS for kind in KINDS), ("tp2 fp64", "gradient")],
)
def test_all_ranks_raise_before_any_update(
    plan: str, kind: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
):
    """With early updates of each unit, and by the norm; step, rank and parameter are named."""
    monkeypatch.setattr(updating, "EARLY_BYTES", 1)
    check(plan, kind, clip)


@pytest.mark.parametrize("kind", KINDS)
def test_all_processes_raise_before_any_update(kind: str):
    """The same on real processes."""
    check("dp2 zero3 fp64", kind, None, run_gloo)


def by_itself(world: World, plan: str, kind: str) -> tuple[str, bool, str]:
    """What a rank raises under a schedule that updates by itself; and then in the next step."""
    engine = engine_of(world, plan, ranks_of(plan) - 1 if kind == "loss" else 0, kind)
    for step in range(BAD):
        stepped(engine, step)
    with pytest.raises(NonFiniteError) as caught:
        stepped(engine, BAD)
    finite = all(bool(p.isfinite().all()) for p in engine.model.parameters() if not p.is_meta)
    steps = [float(state["step"]) for state in engine.optimizer.state.values()]
    finite &= len({*steps}) == 1 or "tp2" not in plan  # no shard of a stage was updated alone
    with pytest.raises(sw.RunError) as after:
        stepped(engine, BAD)
    return str(caught.value), finite, str(after.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", STALE)
def test_stages_that_update_by_themselves_stay_finite(plan: str, kind: str):
    """All ranks raise at the end of the step; no weight is bad; none follows."""
    found = run_threads(ranks_of(plan), by_itself, plan, kind)
    assert len({said for said, _, _ in found}) == 1
    assert f"Step {BAD + 1}: the " in found[0][0]
    for _, finite, after in found:
        assert finite
        assert "run of the schedule was interrupted" in after


def skips(world: World, plan: str, kind: str, clip: float | None) -> list[Any]:
    """Four steps, of which the bad one is skipped: losses, weights, and bytes as predicted."""
    rank = 1 if kind == "loss" else 0  # of two stages the last has the loss, the first HURT
    engine = engine_of(world, plan, rank, kind, clip=clip, on_nonfinite="skip")
    theory = Predictor(
        deep(), plan, EngineOptions(loss=regression, units=1, clip=clip), rank=world.rank
    )
    found = []
    for step in range(4):
        before = state_of(engine) if step else []
        metrics = stepped(engine, step)
        engine.wait()
        same = bool(before) and all(map(torch.equal, before, state_of(engine)))
        sent = {TrafficLine(*k): t.sent_bytes for k, t in engine.last.items() if t.sent_bytes}
        told = theory.of(mine(engine, vectors(step, rows=16)))
        assert sent == told.in_step(step)
        found.append((metrics.skipped, same, metrics.loss))
    return found


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("plan", ["dp2 fp64", "dp2 zero3 fp64", "pp2 1f1b:4 fp64"])
def test_such_a_step_can_be_skipped(plan: str, clip: float | None):
    """The weights stay for that step, the next one trains on; the bytes are those of any step."""
    for kind in KINDS:
        for found in run_threads(2, skips, plan, kind, clip):
            assert [(skipped, same) for skipped, same, _ in found] == [
                *[(False, False)] * BAD,
                (True, True),
                (False, False),
            ]


def goes_on(world: World) -> list[float]:
    """Losses of a run that catches the error and gives the next batch."""
    engine, losses = engine_of(world, "dp2 zero3 fp64", 0, "gradient"), list[float]()
    for step in range(2 * BAD):
        if step == BAD:
            with pytest.raises(NonFiniteError):
                stepped(engine, step)
            engine.steps += 1
        else:
            losses.append(stepped(engine, step).loss)
    return losses


def test_a_program_may_catch_it_and_go_on():
    """The engine is in order: the steps after are those of a run that never had the bad batch."""
    engine = sw.parallelize(deep(), "fp64", alone(), loss=regression, optimizer=sw.AdamW(lr=0.01))
    straight = [stepped(engine, step).loss for step in range(2 * BAD) if step != BAD]
    for losses in run_threads(2, goes_on):
        assert losses == pytest.approx(straight, rel=1e-12)


def overflows(world: World) -> str:
    """fp16 whose gradients overflow whatever the scale."""
    engine = build(world, gpt_task(), Case("dp2 fp16", **ADAMW))
    for p in engine.model.parameters():
        p.register_hook(lambda g: g * float("inf"))
    for step in range(guard.MOST_SKIPS - 1):
        assert engine.step(mine(engine, text(step % 3))).skipped
    with pytest.raises(NonFiniteError) as caught:
        engine.step(mine(engine, text(0)))
    return str(caught.value)


def test_too_many_skips_in_a_row_are_an_error(monkeypatch: pytest.MonkeyPatch):
    """Under fp16, where a single one is a matter of the loss scale."""
    assert guard.MOST_SKIPS == 100
    monkeypatch.setattr(guard, "MOST_SKIPS", 5)
    first, second = run_threads(2, overflows)
    assert first == second and "Step 5: 5 steps in a row" in first
