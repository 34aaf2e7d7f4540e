"""The suite `foresight`: predicted and measured time of a step of the table's plans for two ranks.

    measure the cluster as `doctor --save` does, time some plans, measure the cluster again, ...

All in the same processes. Other programs only add time: of the measurements of the cluster, each
figure is the fastest; of the steps of a plan, those count beside which a fixed product took about
as long as it ever did. Nothing is fitted to a plan.
"""

import gc
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations
from typing import Final

import torch

from benchmarks.table import aligned
from shardwise.cli.configured import PlannedModel
from shardwise.cli.doctor import MOST_BYTES, examine
from shardwise.cli.measured_plans import WARM
from shardwise.cli.predict_command import PredictRequest, predict_request
from shardwise.cli.predict_timeline import engine_on
from shardwise.comm.objects import all_gather_object
from shardwise.comm.start.launch import spawn
from shardwise.comm.world import World, init
from shardwise.core.errors import InputError, bad
from shardwise.core.mesh import Mesh
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems
from shardwise.doctor.diagnosis import Diagnosis, RankDiagnosis
from shardwise.doctor.measured_cluster import measured_cluster
from shardwise.prediction.cluster import Cluster
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.time.step_time import unmodelled
from tests.plans import every_plan

RANKS: Final = 2
ROWS: Final = 12  # of all ranks; a multiple of all microbatches
ROUNDS: Final = 7
TRIES: Final = 8
QUIET: Final = 1.2  # times the shortest product
AGAIN: Final = 8  # plans between two measurements of the cluster
APART: Final = 1.10  # plans whose measured times differ by more have an order


@dataclass(frozen=True)
class ForesightLine:
    """A plan: seconds of a step, predicted and measured (the median over rounds)."""

    plan: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Foresight:
    """The rows of a size of the model, and the cluster that was measured beside them."""

    size: str
    cluster: Cluster
    lines: Sequence[ForesightLine]

    @property
    def median_error(self) -> float:
        """The median of the errors without their signs."""
        return statistics.median(abs(line.error) for line in self.lines)

    @property
    def ordered(self) -> float:
        """Of two plans whose measured times are APART, how often the prediction has their order."""
        pairs = [
            (a.predicted_s < b.predicted_s) == (a.measured_s < b.measured_s)
            for a, b in combinations(self.lines, 2)
            if max(a.measured_s, b.measured_s) > APART * min(a.measured_s, b.measured_s)
        ]
        return statistics.mean(pairs) if pairs else 1.0


def plans() -> list[Plan]:
    """The plans of the table for two ranks of the GPT, in fp32, that are timed in full."""
    found: dict[Plan, None] = {}
    for text in every_plan():
        plan = replace(Plan.parse(text), precision="fp32")
        plan = plan.completed(RANKS)
        if plan.size == RANKS and plan.ep == 1 and not problems(plan):
            found[plan] = None
    return list(found)


def run(size: str, rounds: int | None, chosen: Sequence[str] = ()) -> Foresight:
    """Measure in new processes. Raises InputError for a plan that is not among `plans()`."""
    every = plans()
    for text in chosen:
        if Plan.parse(text).completed(RANKS) not in [replace(p, precision=None) for p in every]:
            allowed = "plans of the table for two ranks, without a precision"
            raise bad(f'the plan "{text}"', allowed, "python -m benchmarks foresight dp2")
    named = [replace(Plan.parse(text), precision="fp32").completed(RANKS) for text in chosen]
    return spawn(_rank, RANKS, (size, ROUNDS if rounds is None else rounds, named or every))[0]


def _rank(size: str, rounds: int, chosen: list[Plan]) -> Foresight:
    return compare(init("cpu"), size, rounds, chosen)


def compare(world: World, size: str, rounds: int, chosen: list[Plan]) -> Foresight:
    """The rows, on every rank."""
    mesh, findings, clock = Mesh.parse(f"dp{world.size}"), list[RankDiagnosis](), QuietClock(world)
    timed: list[tuple[Prediction, float]] = []
    for number, plan in enumerate(chosen):
        if number % AGAIN == 0:
            findings.append(examine(world, mesh, MOST_BYTES, devices=True))
        request = predict_request(PlannedModel(plan, f"gpt:{size}"), ROWS // plan.shares, None, 0)
        try:
            found = request.prediction(0)
        except InputError:  # a plan for another model
            continue
        if not unmodelled(found):
            if world.rank == 0:
                print(f"{size}: {plan}", file=sys.stderr, flush=True)
            timed.append((found, clock.seconds(request, rounds)))
            gc.collect()
    every = all_gather_object(reduce(fastest, findings), world)
    cluster = measured_cluster(Diagnosis(str(mesh), every))
    lines = [
        ForesightLine(str(found.plan), found.step_time(cluster).seconds, seconds)
        for found, seconds in timed
    ]
    return Foresight(size, cluster, lines)


def fastest(a: RankDiagnosis, b: RankDiagnosis) -> RankDiagnosis:
    """The better of each figure of two measurements of a rank."""
    assert a.device is not None and b.device is not None
    products = {
        name: [
            (flops, max(rate, other))
            for (flops, rate), (_, other) in zip(own, b.device.products[name], strict=False)
        ]
        for name, own in a.device.products.items()
    }
    device = replace(
        a.device,
        products=products,
        memory_bytes_per_s=max(a.device.memory_bytes_per_s, b.device.memory_bytes_per_s),
        launch_s=min(a.device.launch_s, b.device.launch_s),
        step_s=min(a.device.step_s, b.device.step_s),
        overlap=max(a.device.overlap, b.device.overlap),
    )
    pairs = zip(a.timings, b.timings, strict=True)
    timings = [min(own, key=lambda timing: timing.seconds) for own in pairs]
    return replace(a, device=device, timings=timings)


class QuietClock:
    """Times steps while no other program slows the machine down, as far as there are such times.

    A fixed product on every rank, before and after each step, tells. `least_s` is the shortest time
    that it ever took on the slowest rank.
    """

    def __init__(self, world: World) -> None:
        self.world, self.least_s = world, float("inf")
        self.a = torch.full((256, 256), 0.5)

    def seconds(self, request: PredictRequest, rounds: int) -> float:
        """The median over `rounds` quiet steps, or over the quietest of TRIES times as many."""
        engine, batch = engine_on(request, self.world)
        for _ in range(WARM):
            engine.step(batch)
        seen: list[tuple[float, float]] = []
        before_s = self._product_s()
        while len(seen) < TRIES * rounds and len(self._quiet(seen)) < rounds:
            self.world.barrier()
            began = time.perf_counter()
            engine.step(batch)
            self.world.barrier()
            step_s, after_s = time.perf_counter() - began, self._product_s()
            seen.append((max(before_s, after_s), step_s))
            before_s = after_s
        return statistics.median(step_s for _, step_s in sorted(seen)[:rounds])

    def _quiet(self, seen: Sequence[tuple[float, float]]) -> list[float]:
        return [step_s for product_s, step_s in seen if product_s < QUIET * self.least_s]

    def _product_s(self) -> float:
        """The time of a few products on the slowest rank, the same on all ranks."""
        self.world.barrier()
        began = time.perf_counter()
        for _ in range(8):
            torch.mm(self.a, self.a)
        slowest_s = max(all_gather_object(time.perf_counter() - began, self.world))
        self.least_s = min(self.least_s, slowest_s)
        return slowest_s


def as_text(found: Foresight) -> str:
    """The rows, the slowest last, and what they say together."""
    rows = [
        (
            line.plan,
            f"{1e3 * line.predicted_s:.1f}",
            f"{1e3 * line.measured_s:.1f}",
            f"{line.error:+.1%}",
        )
        for line in sorted(found.lines, key=lambda line: line.measured_s)
    ]
    device = found.cluster.device
    said = (
        f"{found.size}: median error {found.median_error:.1%} over {len(rows)} plans; of plans "
        f"more than {APART - 1:.0%} apart, {found.ordered:.0%} are in their order. The devices: "
        f"{device.peak_flops['fp32'] / 1e9:.1f} GFLOP/s in fp32, launch "
        f"{1e6 * device.launch_s:.1f} us, overlap {device.overlap:.2f}."
    )
    head = ("plan", "predicted ms", "measured ms", "error")
    return "\n".join([*aligned([head, *rows]), said])
