"""`device_memory` bounds a rank's device, and `offload:auto` takes the least that fits it."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from shardwise.comm.tiers.tiers import Tiers
from shardwise.comm.world import World
from shardwise.core.errors import InputError, RankError
from shardwise.core.plan.plan import Plan
from shardwise.engine.checks.offload_choice import with_offload
from shardwise.engine.parallelize import build_engine
from shardwise.engine.predict import predict, predict_with
from shardwise.models.registry import find
from shardwise.observe.meter import Meter
from shardwise.prediction.peak_memory import LEAST, MOST, device_peak_bytes
from shardwise.prediction.prediction import Prediction
from shardwise.verify.parity import build_options
from shardwise.verify.proof_options import Options
from tests.engine.cases import Case, Task, build, share
from tests.pool import run_threads

TASK = Task()


def predicted(plan: Plan) -> Prediction:
    """The prediction of rank 0 for its rows."""
    rows = share(TASK.batch(0), 0, plan.completed(None).data_size)
    return predict(TASK.make(), plan, rows, loss=TASK.loss, units=1)


def peak_of_two_steps(world: World, plan: str) -> int:
    """The most bytes that the rank stores on its device."""
    engine = build(world, TASK, Case(plan))
    with Meter(engine) as meter:
        for step in range(2):
            engine.step(share(TASK.batch(step), engine.data_rank, engine.data_ranks))
    return meter.peak_bytes


def test_the_allocator_of_cuda_has_the_bound(monkeypatch: pytest.MonkeyPatch):
    """As a fraction of the device's memory, until the engine is freed; a CPU has no bound."""
    seen: list[tuple[float, torch.device]] = []
    total = SimpleNamespace(total_memory=2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: total)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: seen.append(given)
    )
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.75)
    device = torch.device("cuda", 1)
    for most_bytes in (2**19, 2**30):
        Tiers(device=device).bound_device(most_bytes)
    assert seen == [(0.5, device), (0.75, device), (1.0, device), (0.75, device)]
    assert run_threads(1, peak_of_two_steps, "dp1 fp32 device_memory:1KiB")[0] > 1024
    assert len(seen) == 4


@pytest.mark.full
@pytest.mark.parametrize("row", ["dp1", "dp2", "dp2 zero1", "dp2 zero3"])
def test_the_least_offload_that_fits(row: str):
    """A tighter bound takes more: nothing, some units, all of them, parameters; then a refusal."""
    plain = Plan.parse(f"{row} fp32")
    peaks = {
        what: device_peak_bytes(predicted(Plan.parse(f"{row} fp32 {what}".strip())))
        for what in ("", "offload:optim=0.5", "offload:optim", "offload:param")
        if not (what == "offload:param" and "zero1" in row)
    }
    assert list(peaks.values()) == sorted(peaks.values(), reverse=True)
    chosen = []
    for peak in peaks.values():
        bound = f"offload:auto device_memory:{peak}B"
        plan = with_offload(Plan.parse(f"{plain} {bound}"), predicted)
        assert device_peak_bytes(predicted(plan)) <= peak
        chosen.append(plan.offload)
    assert chosen[0] is None
    assert chosen[1] is not None
    assert 0 < Plan.parse(f"offload:{chosen[1]}").offloaded.share <= 0.6  # type: ignore[union-attr]
    assert chosen[2].startswith("optim")
    assert chosen[3:] == ["param"] * len(chosen[3:])
    least = min(peaks.values())
    with pytest.raises(InputError, match=f"{least:,} bytes or more"):
        with_offload(Plan.parse(f"{plain} offload:auto device_memory:{least - 1}B"), predicted)


@pytest.mark.full
def test_it_fits_on_every_stage():
    """The first stage keeps more activations, the last the head: the larger decides."""
    rows = share(TASK.batch(0), 0, 1)

    def on(rank: int) -> Prediction:
        plan = Plan.parse("pp2 1f1b:2 fp32")
        return predict(TASK.make(), plan, rows, rank=rank, loss=TASK.loss, units=1)

    peaks = [device_peak_bytes(on(rank)) for rank in range(2)]
    assert peaks[0] != peaks[1]
    for first in range(2):  # seen from either stage
        for bound, expected in ((max(peaks), None), (max(peaks) - 1, "optim")):
            plan = Plan.parse(f"pp2 1f1b:2 fp32 offload:auto device_memory:{bound}B")
            found = with_offload(
                plan,
                lambda tried, rank=first: predict(
                    TASK.make(), tried, rows, rank=rank, loss=TASK.loss, units=1
                ),
            )
            assert (found.offload or "")[:5] == (expected or "")


@pytest.mark.full
def test_a_chosen_plan_runs_in_its_bound():
    """With room for temporaries the chosen plan has enough; without offload there is too little."""
    bound = device_peak_bytes(predicted(Plan.parse("dp1 fp32 offload:optim")))
    plan = with_offload(Plan.parse(f"dp1 fp32 offload:auto device_memory:{bound}B"), predicted)
    chosen, plain = (run_threads(1, peak_of_two_steps, str(p))[0] for p in (plan, "dp1 fp32"))
    assert chosen <= bound + 20000 < plain


def test_auto_needs_a_bound_and_a_batch():
    """Without a bound, and where the batch is not known, the error says what to write."""
    with pytest.raises(InputError, match="device_memory:8GiB"):
        with_offload(Plan.parse("dp2 offload:auto"), predicted, torch.device("cpu"))
    with pytest.raises(RankError, match="shardwise predict"):
        run_threads(1, partial(peak_of_two_steps, plan="dp1 offload:auto device_memory:1MiB"))


@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    [
        *("dp2 fp32", "dp2 zero1 fp32", "dp2 zero2 fp32", "dp2 zero3 fp32"),
        *("dp2 fp32 offload:optim", "dp2 zero1 fp32 offload:optim-delayed=0"),
        *("dp2 zero2 fp32 offload:optim=0.5", "dp2 zero3 fp32 offload:param"),
        "dp2 zero3 fp32 recompute:full offload:optim",
    ],
)
def test_the_predicted_peak_is_that_of_a_step(plan: str):
    """A step stores 0.85 to 1.2 times the prediction at its peak, temporaries of kernels too."""
    predictions, peaks = zip(*run_threads(2, peak_of_a_step, plan), strict=True)
    for expected, peak in zip(predictions, peaks, strict=True):
        assert LEAST <= peak / expected <= MOST, (plan, peak, expected)


def peak_of_a_step(world: World, words: str) -> tuple[int, int]:
    """The peak of a rank's third step of verify's model: predicted, and measured."""
    model, plan = find("gpt"), Plan.parse(words)
    options = build_options(model, plan, Options())
    engine = build_engine(model.build(), plan, world, replace(options, tokens=model.tokens))
    batch = model.batch(2, 0)
    for _ in range(3):
        with Meter(engine) as meter:
            engine.step(batch)
    found = predict_with(model.build(), plan, batch, options, world.rank)
    return device_peak_bytes(found), meter.peak_bytes
