import math
from functools import partial

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.comm.world import World
from shardwise.engine.norm import ROW, squared_norm
from shardwise.engine.scale import LossScale
from shardwise.engine.state_dict import full_parameters
from tests.engine.cases import (
    ROWS,
    Case,
    Task,
    build,
    oracle,
    ranks_of,
    rows_task,
    share,
    text,
    train,
    vectors,
)
from tests.engine.zoo import make
from tests.pool import run_gloo, run_threads

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
PLANS = [*(f"dp2 {row}" for row in ROWS), "dp_replicate2 dp_shard2 zero2"]


def dtypes(world: World, plan: str) -> list[tuple[torch.dtype, ...]]:
    """Of weight, gradient, master and the two moments, for each group after a step."""
    engine = build(world, Task(), Case(plan))
    engine.step(share(text(0), engine.data_rank, engine.data_ranks))
    found = []
    for k, flat in enumerate(engine.optimizer.flats):
        assert flat.grads.gshard is not None
        master = engine.optimizer.masters[k]
        state = engine.optimizer.torch.state[engine.optimizer.targets[k][0]]
        moments = state["exp_avg"].dtype, state["exp_avg_sq"].dtype
        found.append((flat.shard.dtype, flat.grads.gshard.dtype, master.dtype, *moments))
        assert torch.equal(flat.shard, master.to(flat.dtype))
        assert master.numel() == flat.plan.share
    return found


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("plan", PLANS)
def test_half_precision_keeps_masters_of_this_ranks_part(plan, precision):
    """2 + 2 + 12: weight and gradient in 16 bits, master and moments in fp32, of the block only."""
    half, full = HALF[precision], torch.float32
    for found in run_threads(ranks_of(plan), dtypes, f"{plan} {precision}"):
        assert set(found) == {(half, half, full, full, full)}


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("plan", PLANS)
def test_half_precision_trains_like_fp32(plan, precision):
    """Losses over 6 steps stay within 2 % of fp32's, and ranks agree to the bit."""
    case = Case(f"{plan} {precision}", steps=6, clip=1.0)
    expected = oracle(Task(), case, torch.float32).losses
    runs = run_gloo(ranks_of(plan), losses_only, case)
    assert all(run == runs[0] for run in runs)
    skipped = sum(math.isnan(loss) for loss in runs[0])
    assert skipped == 0 and runs[0] == pytest.approx(expected, rel=0.02)


def losses_only(world: World, case: Case) -> list[float]:
    engine = build(world, Task(), case)
    engine.scale.value = min(engine.scale.value, 2.0**10)
    return [
        engine.step(share(text(s), engine.data_rank, engine.data_ranks)).loss
        for s in range(case.steps)
    ]


def ones() -> torch.nn.Module:
    """Weights between which bf16 has nothing for a hundredth."""
    model = make("stack")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    return model


def tiny_updates(world: World) -> tuple[bool, float]:
    """Steps too small to move a bf16 weight, one at a time."""
    case = Case("dp2 zero1 bf16", kind=torch.optim.SGD, options={"lr": 1e-5})
    engine = build(world, rows_task(ones), case)
    before = [master.clone() for master in engine.optimizer.masters.values()]
    first = [flat.shard.clone() for flat in engine.optimizer.flats]
    engine.step(share(vectors(0), engine.data_rank, engine.data_ranks))
    same = [torch.equal(a, f.shard) for a, f in zip(first, engine.optimizer.flats, strict=True)]
    after = engine.optimizer.masters.values()
    return all(same), max(
        float((a - b).abs().max()) for a, b in zip(before, after, strict=True) if a.numel()
    )


def test_masters_add_up_what_bf16_would_lose():
    """The weights do not move, the masters do."""
    for still, moved in run_threads(2, tiny_updates):
        assert still and moved > 0


class Log:
    """What each step was."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.skipped: list[bool] = []
        self.moved: list[bool] = []
        self.losses: list[float] = []


def overflowing(world: World, plan: str) -> Log:
    """Six steps; in the third the last rank's rows are so large that fp16 overflows there only."""
    engine = build(world, rows_task(partial(make, "stack")), Case(plan, clip=1.0))
    engine.scale.value = 256.0
    log = Log()
    for step in range(6):
        x, y = vectors(step, rows=8)
        if step == 2:
            x, y = x.clone(), y.clone()
            y[-1] = 6e4
        before = full_parameters(engine.flats)
        m = engine.step(share((x, y), engine.data_rank, engine.data_ranks))
        log.skipped.append(m.skipped)
        assert (m.grad_norm is None) == m.skipped
        after = full_parameters(engine.flats)
        log.moved.append(any(not torch.equal(before[n], after[n]) for n in before))
        log.scales.append(engine.scale.value)
        log.losses.append(m.loss)
    return log


@pytest.mark.parametrize("plan", PLANS)
def test_an_overflow_on_one_rank_is_skipped_by_all(plan):
    """Nobody updates, the scale is halved everywhere, and the next step goes on."""
    logs = run_threads(ranks_of(plan), overflowing, f"{plan} fp16")
    for log in logs:
        assert log.skipped == [False, False, True, False, False, False]
        assert log.moved == [True, True, False, True, True, True]
        assert log.scales == [256.0, 256.0, 128.0, 128.0, 128.0, 128.0]
        assert log.losses[3:] == logs[0].losses[3:]
    one = run_threads(1, overflowing, "fp16")[0]
    assert logs[0].losses[3:] == pytest.approx(one.losses[3:], rel=5e-3)
    assert one.skipped == logs[0].skipped


def from_the_top(world: World, plan: str) -> tuple[list[bool], list[float]]:
    """From the usual first scale, on losses that overflow under it."""

    def loud(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean() * 64

    task = Task(partial(make, "stack"), vectors, loud, None)
    engine = build(world, task, Case(plan))
    skipped, scales = [], []
    for step in range(12):
        skipped.append(engine.step(share(vectors(step), engine.data_rank, 2)).skipped)
        scales.append(engine.scale.value)
    return skipped, scales


def test_the_scale_comes_down_until_gradients_fit():
    """From 65536 on it is halved once for each skipped step, and then training goes on."""
    one, two = run_threads(2, from_the_top, "dp2 zero3 fp16")
    assert one == two
    skipped, scales = one
    count = sum(skipped)
    assert 0 < count < 8 and skipped == [True] * count + [False] * (12 - count)
    assert scales[-1] == 2.0 ** (16 - count)


def test_the_scale_doubles_after_long_enough():
    """2000 good updates double it, up to 2^24; one overflow starts the count again."""
    scale = LossScale(on=True, first=4.0, patience=3)
    for overflow in (False, False, True, False, False, False, False):
        scale.update(overflow)
    assert (scale.value, scale.good) == (4.0, 1)
    top = LossScale(on=True, first=2.0**24, patience=1)
    top.update(overflow=False)
    assert top.value == 2.0**24
    off = LossScale(on=False)
    off.update(overflow=True)
    assert off.value == 1.0


def test_precision_is_the_plans_and_fp64_reaches_buffers():
    """Each word sets the dtype of every floating-point parameter; fp64 that of buffers too."""
    for word, dtype in {"fp32": torch.float32, "fp64": torch.float64, **HALF}.items():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        engine = sw.parallelize(model, word, sw.init("cpu"))
        assert {p.dtype for p in engine.model.parameters()} == {dtype}
        wide = torch.float64 if word == "fp64" else torch.float32
        assert model.get_buffer("1.running_mean").dtype == wide
        assert model.get_buffer("1.num_batches_tracked").dtype == torch.int64


@pytest.mark.parametrize("dtype", [*HALF.values(), torch.float32], ids=str)
def test_norms_are_those_of_the_values_in_double(dtype: torch.dtype):
    """Of rows of 65,536 and what is left of one: sums of 16-bit values are not rounded to them."""
    x = torch.rand(2 * ROW + 77, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = x.double().square().sum()
    assert squared_norm(x).dtype == torch.float64
    assert float(squared_norm(x)) == pytest.approx(float(expected), rel=1e-5)


def test_fp16_and_bf16_run_every_row_alike():
    """The four rows of one precision, on the same ranks, take the same steps to the bit."""
    for precision in HALF:
        runs = [
            run_threads(2, train_masters, Case(f"dp2 {row} {precision}", steps=3)) for row in ROWS
        ]
        assert all(run == runs[0] for run in runs)


def train_masters(world: World, case: Case) -> list[float]:
    return train(world, Task(), case).losses
