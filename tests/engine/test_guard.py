"""Steps that go wrong: not finite, computed wrong by one rank, out of memory.

All ranks raise at once, before any update.
"""

import math
import re
import threading
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.tiers.host_memory import HostNumbers
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError, NonFiniteError
from shardwise.core.tools.arguments import CheckEvery
from shardwise.engine.checks import guard
from shardwise.engine.checks.device_room import ran_out
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer import optimizer
from shardwise.engine.options import EngineOptions
from shardwise.flat.flat_gradient import FlatGradient
from shardwise.observe.dry_twin import DryTwin
from shardwise.train import loop
from tests.engine.cases import ranks_of, regression, settled, squares, text, vectors
from tests.engine.pipelines import deep
from tests.engine.tensors import ADAMW, Case, build, gpt_task, mine, step_as_predicted
from tests.pool import run_gloo, run_threads
from tests.train.runs import settings

#: Rows, hybrid sharding, accumulation, stages, a tensor axis, schedules that update by themselves.
PLANS = [
    *("dp2 fp64", "dp2 zero1 fp64", "dp2 zero2 accumulate:2 fp64", "dp2 zero3 fp64"),
    *("dp_replicate2 dp_shard2 zero3 fp64", "pp2 1f1b:4 fp64", "pp2 dp2 zero2 gpipe:2 fp64"),
    *("pp2 zb-h1:4 fp64", "pp2 interleaved:4x2 zero3 dp2 fp64"),
]
#: On the tensor axis only one rank holds the columns with the bad gradient; the loss is one.
TABLE = {"2": "colwise", "4": "rowwise"}
STALE = ["pp2 2bw:4 fp64", "pp2 pipedream:4 fp64", "pp2 dp2 zero1 2bw:4 fp64"]
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
    return [box.tensor.clone() for box in engine.boxes()]


def stepped(engine: Engine, step: int) -> sw.Metrics:
    return engine.step(mine(engine, vectors(step, rows=16)))


def refused(
    world: World, plan: str, rank: int, kind: str, clip: float | None
) -> tuple[str, bool, float]:
    """What every rank raises in the bad step, whether it left all as it was, and the next loss."""
    engine = engine_of(world, plan, rank, kind, clip=clip)
    for step in range(BAD):
        stepped(engine, step)
    before = state_of(engine)
    with pytest.raises(NonFiniteError) as caught:
        stepped(engine, BAD)
    engine.wait()
    same = all(map(torch.equal, before, state_of(engine)))
    engine.steps += 1
    return str(caught.value), same, stepped(engine, BAD + 1).loss


@cache
def straight(clip: float | None) -> float:
    """The loss of the step after the bad one, in a run that never had the bad batch."""
    named: dict[str, Any] = {"optimizer": sw.AdamW(lr=0.01), "clip": clip}
    engine = sw.parallelize(deep(), "fp64", alone(), loss=regression, **named)
    return [stepped(engine, step).loss for step in (*range(BAD), BAD + 1)][-1]


def last_of(plan: str, kind: str) -> int:
    """The last rank, of a gradient the one where the stage with HURT is."""
    return ranks_of(plan) - 1 if kind == "loss" or "pp" not in plan else 0


def check(plan: str, kind: str, clip: float | None) -> None:
    """All ranks raise the last one's fault in the same words, unchanged; a program may go on."""
    ranks = ranks_of(plan)
    last = last_of(plan, kind)
    found = run_threads(ranks, refused, plan, last, kind, clip)
    assert len({said for said, _, _ in found}) == 1
    said = found[0][0]
    what = "the loss is not finite" if kind == "loss" else "the gradient"
    assert said.startswith(f"Step {BAD + 1}: {what}") and f"on rank {last}" in said
    assert "the first parameter with a non-finite gradient is " in said
    if kind == "gradient":
        assert f"is {HURT}" in said
    for _, same, loss in found:
        assert same and loss == pytest.approx(straight(clip), rel=1e-10)


@pytest.mark.crossed
@pytest.mark.cases(4)
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(
    ("plan", "kind"),
    [("tp2 fp64", "gradient"), *((plan, kind) for plan in PLANS for kind in KINDS)],
)
def test_all_ranks_raise_before_any_update(
    plan: str, kind: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
):
    """With early updates of each unit, and by the norm; step, rank and parameter are named."""
    monkeypatch.setattr(optimizer, "EARLY_BYTES", 1)
    check(plan, kind, clip)


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


@pytest.mark.parametrize(
    ("plan", "kind"),
    [*((plan, kind) for plan in STALE for kind in KINDS), ("tp2 pp2 2bw:4 fp64", "gradient")],
)
def test_stages_that_update_by_themselves_stay_finite(plan: str, kind: str):
    """All ranks raise at the end of the step; no weight is bad; none follows."""
    found = run_threads(ranks_of(plan), by_itself, plan, kind)
    assert len({said for said, _, _ in found}) == 1
    assert f"Step {BAD + 1}: the " in found[0][0]
    for _, finite, after in found:
        assert finite
        assert "run of the schedule was interrupted" in after


def skips(world: World, plan: str, kind: str) -> list[tuple[bool, bool]]:
    """Whether each of four steps was skipped and left the weights, bytes being as predicted."""
    rank = 1 if kind == "loss" else 0  # of two stages the last has the loss, the first HURT
    engine = engine_of(world, plan, rank, kind, on_nonfinite="skip")
    options = EngineOptions(loss=regression, units=1)
    dry, found = DryTwin(deep(), engine.plan, options, world.rank), []
    for step in range(4):
        before = state_of(engine) if step else []
        skipped = step_as_predicted(engine, dry, mine(engine, vectors(step, rows=16))).skipped
        engine.wait()
        same = bool(before) and all(map(torch.equal, before, state_of(engine)))
        found.append((skipped, same))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", ["dp2 fp64", "dp2 zero3 fp64", "pp2 1f1b:4 fp64"])
def test_such_a_step_can_be_skipped(plan: str, kind: str):
    """The weights stay for that step, the next one trains on; the bytes are those of any step."""
    wanted = [*[(False, False)] * BAD, (True, True), (False, False)]
    assert run_threads(2, skips, plan, kind) == [wanted] * 2


def spikes(world: World, plan: str) -> list[int]:
    """The steps that were skipped: all losses of step 30 are a hundred times as large."""
    large, task = [False], gpt_task()
    how = {"optimizer": sw.AdamW(lr=1e-3), "on_nonfinite": "skip:6"}
    loss = lambda m, batch: task.loss(m, batch) * (99 * large[0] + 1)  # noqa: E731
    engine, found = sw.parallelize(task.make(), plan, world, loss=loss, **how), list[int]()
    for step in range(34):
        large[0] = step == 30
        if step == 28:  # what is known of recent steps is in a checkpoint
            saved = engine.scalars()
            engine.load_scalars(saved | {"norms": [0.0, 0.0, 0.0]})
            engine.load_scalars(saved)
        before = state_of(engine) if large[0] else []
        found += [step] if engine.step(mine(engine, text(step % 7))).skipped else []
        engine.wait()
        assert all(map(torch.equal, before, state_of(engine)))
    return found


@pytest.mark.parametrize("plan", ["dp2 fp64", "tp2 bf16", "pp2 1f1b:2 fp64"])
def test_a_step_with_a_spike_can_be_skipped(plan: str):
    """A gradient far above those of recent steps; without clipping, and the next one trains on."""
    assert run_threads(2, spikes, plan) == [[30]] * 2


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


# --- the rerun -----------------------------------------------------------------------------------

RERUN = [
    *("dp2 fp64", "dp2 zero2 accumulate:2 bf16", "dp_replicate2 dp_shard2 zero3 accumulate:2 fp64"),
    "dp2 zero3 recompute:inner fp16",
]
WRONG = 3  # the step, from 1, in which a rank computes something wrong


class Net(nn.Module):
    """Random numbers, buffers that change with each forward, and a parameter without a use."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(rate)
        self.outer = nn.Linear(8, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.drop(self.norm(self.inner(x))))


def rows(step: int, rank: int) -> Tensor:
    """Ranks have different numbers of rows."""
    return torch.randn(6 + rank, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def four_steps(world: World, plan: str, check_every: int | str) -> tuple[list[float], list[Tensor]]:
    """The losses and the values of four steps, whose bytes are those predicted."""
    torch.manual_seed(world.rank)
    options: dict[str, Any] = {"loss": squares, "check_every": check_every}
    engine, losses = sw.parallelize(settled(Net(0.3)), plan, world, **options), list[float]()
    dry = DryTwin(settled(Net()), engine.plan, EngineOptions(**options), world.rank)
    for step in range(4):
        losses.append(step_as_predicted(engine, dry, rows(step, engine.data_rank)).loss)
    return losses, [box.tensor.clone() for box in engine.boxes()]


@pytest.mark.parametrize("plan", RERUN)
def test_a_rerun_reports_nothing_of_a_right_run_and_changes_no_bit_of_it(plan: str):
    """Though passes draw random numbers and change buffers; its bytes are those of the formula."""
    ranks = ranks_of(plan)
    plain, checked = (run_gloo(ranks, four_steps, plan, every) for every in (0, "0 rerun:2"))
    for (losses, tensors), (others, compared) in zip(plain, checked, strict=True):
        assert losses == others
        assert all(map(torch.equal, tensors, compared))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """A rank whose `act` is set computes the gradient of `outer.weight` wrong, before any sum."""

    def collect(self: FlatGradient, indices: list[int], *, mute: bool = False) -> None:
        real(self, indices, mute=mute)
        for i in indices if getattr(own, "act", None) is not None else ():
            if self.names[i] == "outer.weight" and self.filled[i]:
                own.act(self.grad_views[i])

    own, real = threading.local(), FlatGradient.collect  # ranks are threads
    monkeypatch.setattr(FlatGradient, "collect", collect)
    return own


def until_found(
    world: World, broken: threading.local, plan: str, where: int, passes: set[int], bit: int
) -> str:
    """What is raised, and in which step; `passes` of step WRONG on one rank turn a bit over."""
    engine = sw.parallelize(settled(Net()), plan, world, loss=squares, check_every="0 rerun:2")
    for step in range(1, 5):
        count = iter(range(100))

        def act(gradient: Tensor, count: Any = count) -> None:
            if next(count) in passes:
                gradient.view(-1).view(torch.int64)[0] ^= 1 << bit

        broken.act = act if world.rank == where and step == WRONG else None
        try:
            engine.step(rows(step, engine.data_rank))
        except InputError as error:
            return f"{step}: {error}"
    return ""


BOTH = "Write instead: a test of both machines"


@pytest.mark.parametrize(
    ("plan", "passes", "said"),
    [
        ("dp2 fp64", {1}, (r"on data rank 1: .* again on data rank 0", BOTH)),
        ("dp2 zero3 fp64", {0}, (r"on data rank 0: .* again on data rank 1", BOTH)),
        (
            "dp3 zero2 accumulate:2 fp64",
            {0, 1},
            (r"on data rank 0: .* again on data rank 1", "another machine for data rank 1"),
        ),
        (
            "dp_replicate2 dp_shard2 zero1 fp64",
            {1},
            (r"on data rank 1: .* again on data rank 0", BOTH),
        ),
    ],
)
def test_a_wrong_gradient_of_one_rank_is_named(
    broken: threading.local, plan: str, passes: set[int], said: tuple[str, str]
):
    """On all ranks before the update, with its step; a rank that is wrong twice is named."""
    for found in run_threads(ranks_of(plan), until_found, broken, plan, 1, passes, 60):
        assert found.startswith(f"{WRONG}: Given: the gradient of outer.weight in step {WRONG} ")
        assert all(re.search(part, found) for part in said)


def test_the_last_bit_of_a_gradient_is_a_warning(broken: threading.local):
    """Kernels that add in no fixed order reach that. Tensor, step and ranks are named."""
    name = rf"the gradient of outer.weight in step {WRONG} on data rank 1: .*by rounding"
    with pytest.warns(UserWarning, match=name):
        found = run_threads(2, until_found, broken, "dp2 fp64", 1, {1}, 0)
    assert found == ["", ""]


@pytest.mark.parametrize("value", ["", "50", "rerun", "50rerun:5", "rerun:5 50", -1, 1.5, True])
def test_the_option_is_read(value: Any):
    """Numbers and texts; the rest is refused."""
    read = {7: (7, 0), "rerun:5": (100, 5), "50 rerun:5": (50, 5)}
    assert all(CheckEvery.parse(text) == CheckEvery(*steps) for text, steps in read.items())
    with pytest.raises(InputError, match=r"check_every=.*100 rerun:20"):
        CheckEvery.parse(value)


# --- out of memory --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] can't allocate memory: 8 bytes"), True),
        (RuntimeError("The size of tensor a must match"), False),
        (ValueError("no memory was allocated"), False),
    ],
)
def test_what_counts_as_running_out(error: Exception, expected: bool):
    """Allocation errors of CUDA and of the host are; other errors are not."""
    assert ran_out(error) is expected


def test_training_ends_with_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    """`shardwise train` answers with a paragraph: exit code 1."""

    def step(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(sw.Engine, "step", step)
    said = r"Rank 0 ran out of memory in step 1 under .*Tried to allocate 2.00 GiB\)"
    with pytest.raises(sw.RunError, match=said):
        loop.train(settings(tmp_path / "run", "fp32 device_memory:1MiB"), alone())


# --- on a GPU, whose numbers are read one step late ----------------------------------------------


def read_late(world: World, plan: str, kind: str, clip: float | None) -> tuple[str, str, bool]:
    """The errors of the metrics of the bad step and of the step after it; whether neither wrote."""
    engine = engine_of(world, plan, last_of(plan, kind), kind, clip=clip)
    for step in range(BAD):
        stepped(engine, step)
    before = state_of(engine)
    metrics = stepped(engine, BAD)
    with pytest.raises(NonFiniteError) as asked:
        _ = metrics.loss
    with pytest.raises(NonFiniteError) as caught:
        stepped(engine, BAD + 1)
    same = all(map(torch.equal, before, state_of(engine)))
    assert math.isfinite(stepped(engine, BAD + 2).loss)
    return str(asked.value), str(caught.value), same


@pytest.mark.crossed
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", [*PLANS[1:5], PLANS[5]])
def test_a_late_step_updates_nothing_and_the_next_one_says_so(
    plan: str, kind: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
):
    """To read its metrics raises, and so does the next step on all ranks; then training goes on."""
    monkeypatch.setattr(HostNumbers, "ready", property(lambda _: False))
    for asked, caught, same in run_threads(ranks_of(plan), read_late, plan, kind, clip):
        assert same
        assert asked.startswith(f"Step {BAD + 1}:")
        assert caught.startswith(f"Step {BAD + 1}:")
