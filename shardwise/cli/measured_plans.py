"""Steps of plans, timed on new local ranks: all plans in the same processes, one after another."""

import os
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli.configured import configured
from shardwise.cli.predict_command import predict_request
from shardwise.core.errors import bad

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.comm.world import World
    from shardwise.core.plan.plan import Plan
    from shardwise.prediction.search.result import RankedPlan

WARM: Final = 3  # steps before the timed ones
STEPS: Final = 5


class MeasuredPlan(NamedTuple):
    """A plan's predicted and measured time of a step."""

    plan: "Plan"
    predicted_s: float
    measured_s: float

    def as_json(self) -> dict[str, Any]:
        """The values as an object of JSON."""
        return self._asdict() | {"plan": str(self.plan)}


def measure_plans(
    ranked: "Sequence[RankedPlan]", config: "Path | None", model: str | None, sequence: int | None
) -> list[MeasuredPlan]:
    """The plans by their measured time, the fastest first.

    Raises InputError for models without room here, RankError if a rank fails.
    """
    from shardwise.comm.start.launch import spawn
    from shardwise.models.trainable import WEIGHT_BYTES

    ranks = ranked[0].plan.size
    device = device_for(ranks)
    requests = [
        predict_request(
            configured(config, str(each.plan), model),
            each.rows * each.plan.microbatches,
            sequence,
            0,
        )
        for each in ranked
    ]
    requests[0].trainable.require_memory(WEIGHT_BYTES * ranks)
    given = [request.given for request in requests]
    with Console(stderr=True).status(Text(f"{len(given)} plans on {ranks} ranks")):
        seconds = spawn(_rank, ranks, (given, device), device)[0]
    found = [
        MeasuredPlan(each.plan, each.seconds, measured_s)
        for each, measured_s in zip(ranked, seconds, strict=True)
    ]
    return sorted(found, key=lambda each: each.measured_s)


def device_for(ranks: int) -> str:
    """Where so many ranks are timed: "cuda" if each has a GPU, "cpu" if each has a core.

    Raises InputError if neither holds: ranks that share a core measure each other.
    """
    from torch import cuda

    cores, gpus = len(os.sched_getaffinity(0)), cuda.device_count()
    if ranks > max(cores, gpus):
        given = f"--measure for {ranks} ranks, on a machine with {cores} cores and {gpus} GPUs"
        allowed = f"at most {max(cores, gpus)} ranks, one for each core or GPU"
        raise bad(given, allowed, f"--ranks {max(cores, gpus)}")
    return "cuda" if ranks <= gpus else "cpu"


def _rank(given: Sequence[tuple[Any, ...]], device: str) -> list[float]:
    """The seconds of a step of each request, on this rank."""
    from shardwise.comm.world import init

    world = init(device)
    found = [step_seconds(predict_request(*each), world) for each in given]
    world.barrier()
    return found


def step_seconds(request: Any, world: "World", steps: int = STEPS) -> float:
    """The median time of a step after the first ones. All ranks call it."""
    from shardwise.cli.predict_timeline import engine_on

    engine, batch = engine_on(request, world)
    times: list[float] = []
    for _ in range(WARM + steps):
        world.barrier()
        began = time.perf_counter()
        engine.step(batch)
        world.barrier()
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM:])


def measured_table(found: Sequence[MeasuredPlan]) -> Table:
    """Predicted and measured time side by side."""
    table = Table(title=f"measured: the median of {STEPS} steps")
    for head in ("plan", "predicted", "measured", "predicted / measured"):
        table.add_column(head, justify="left" if head == "plan" else "right")
    for plan, predicted_s, measured_s in found:
        times = f"{predicted_s:.4g} s", f"{measured_s:.4g} s", f"{predicted_s / measured_s:.2f}"
        table.add_row(str(plan), *times)
    return table
