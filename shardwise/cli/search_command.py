"""`shardwise search`: the fastest plans of a model on a cluster.

shardwise search --model llama:8b --cluster h100-sxm --ranks 64   the ten best
shardwise search ... --measure 3                                  and run the three best here
"""

import json
import shlex
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli.configured import CONFIG, JSON, MODEL, SEQUENCE, configured
from shardwise.cli.predict_command import new_console, predict_request, resized
from shardwise.comm.start.rendezvous import require_local
from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.arguments import integer
from shardwise.core.tools.signs_of_life import signs_of_life

if TYPE_CHECKING:
    from shardwise.comm.world import World
    from shardwise.derive.search.result import RankedPlan, SearchResult

SHOWN = 10


def search_command(
    *,
    cluster: Annotated[
        str, typer.Option(metavar="CLUSTER", help="a100-80gb, h100-sxm, h200, b200 or a file.")
    ],
    ranks: Annotated[int, typer.Option(help="Devices to plan for.")],
    model: Annotated[str | None, MODEL] = None,
    config: Annotated[Path | None, CONFIG] = None,
    batch: Annotated[
        int | None, typer.Option(help="Rows of a step of all ranks; one a rank if not given.")
    ] = None,
    sequence: Annotated[int | None, SEQUENCE] = None,
    measure: Annotated[
        int | None, typer.Option(metavar="N", help="Run the N best plans here, and rank by that.")
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Find the fastest plans that fit on a number of devices."""
    from shardwise.derive.plan_search import search
    from shardwise.models.registry import find
    from shardwise.prediction.cluster import cluster_of
    from shardwise.verify.oracles import batches

    if measure is not None:
        integer("--measure", measure, 1, 3, SHOWN)
        device_for(ranks)
    of, run = cluster_of(cluster), configured(config, "dp1 bf16", model)
    trainable, rows = find(run.model), batch or run.batch or ranks
    options = run.options(trainable, run.table, "cuda")
    sample = resized(trainable.batch(1, batches.SEED), sequence, run.name)
    with signs_of_life(lambda: f"plans of {run.name} on {ranks} ranks"):
        found = search(trainable.plain(), of, ranks, sample, rows=rows, options=options)
    best = found.ranked[: measure or 0]
    measured = measure_plans(best, config, model, sequence) if best else []
    if as_json:
        told = {"measured": [each.as_json() for each in measured]} if measured else {}
        print(json.dumps(found.as_json(SHOWN) | told))
        return
    if found.best is None:
        raise _nothing(found, run.name)
    fastest = _show(found, run.name, measured)
    line = f'shardwise predict "{fastest.plan}" --model {model or "gpt"} '
    line += f"--batch {fastest.rows * fastest.plan.microbatches} --cluster {shlex.quote(cluster)}"
    line += "" if sequence is None else f" --sequence {sequence}"
    if config is not None:
        line = f'shardwise train {config} --plan "{fastest.plan}"'
    new_console().print(f"The best: {line}", soft_wrap=True)


def _nothing(found: "SearchResult", name: str) -> Exception:
    from shardwise.train.progress import size_text

    device, near = found.cluster.device, found.nearest
    given = f"{name} on {found.ranks} ranks of {device.name}, where no plan fits"
    if near is not None:
        over = size_text(near.over_bytes)
        given += f'; the nearest is "{near.plan}", at least {over} over a device\'s '
        given += size_text(device.memory_bytes)
    elif found.refused:
        given += f"; the first is refused: {found.refused[0].reason}"
    more = f"--ranks {2 * found.ranks} --batch {2 * found.batch}"
    return bad(given, "more ranks, a smaller model, or shorter rows", more)


def _show(found: "SearchResult", name: str, measured: "Sequence[MeasuredPlan]") -> "RankedPlan":
    """Print the best plans and the measured ones; returns the fastest."""
    from shardwise.train.progress import size_text

    console = new_console()
    where = f"{found.ranks} ranks of {found.cluster.device.name}"
    table = Table(title=f"{name} on {where}: {found.batch} rows a step")
    for head in ("plan", "step", "MFU", "memory", "sent", "bound by"):
        table.add_column(head, justify="left" if head in ("plan", "bound by") else "right")
    for each in found.ranked[:SHOWN]:
        sizes = size_text(each.peak_bytes), size_text(sum(each.sent_bytes.values()))
        time = f"{each.seconds:.4g} s", f"{each.time.mfu:.1%}"
        table.add_row(str(each.plan), *time, *sizes, each.bound)
    console.print(table)
    large = sum(each.over_bytes > 0 for each in found.refused)
    wrong = len(found.refused) - large
    console.print(
        f"{len(found.ranked)} plans were timed; {found.slower} are slower by their bound, {large} "
        f"do not fit, {wrong} cannot run.",
        soft_wrap=True,
    )
    if not measured:
        return found.ranked[0]
    console.print(measured_table(measured))
    return next(each for each in found.ranked if each.plan == measured[0].plan)


WARM: Final = 3  # steps before the timed ones
STEPS: Final = 5


class MeasuredPlan(NamedTuple):
    """A plan's predicted and measured time of a step."""

    plan: "Plan"
    predicted_s: float
    measured_s: float

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"plan": str(self.plan)}


def measure_plans(
    ranked: "Sequence[RankedPlan]", config: "Path | None", model: str | None, sequence: int | None
) -> list[MeasuredPlan]:
    """The plans by their measured time, the fastest first."""
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
    """The device for so many ranks: cuda with a GPU for each, or cpu with a core for each."""
    from torch import cuda

    if ranks <= cuda.device_count():
        return "cuda"
    require_local(ranks, f"dp{ranks}")
    return "cpu"


def _rank(given: Sequence[tuple[Any, ...]], device: str) -> list[float]:
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
    """The measured times beside the predicted ones."""
    table = Table(title=f"measured: the median of {STEPS} steps")
    for head in ("plan", "predicted", "measured", "predicted / measured"):
        table.add_column(head, justify="left" if head == "plan" else "right")
    for plan, predicted_s, measured_s in found:
        times = f"{predicted_s:.4g} s", f"{measured_s:.4g} s", f"{predicted_s / measured_s:.2f}"
        table.add_row(str(plan), *times)
    return table
