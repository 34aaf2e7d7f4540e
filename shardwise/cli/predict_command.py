"""`shardwise predict PLAN`: the memory and traffic of a rank, without starting one.

Without `--config`, it predicts the run that `shardwise verify PLAN` proves: the same model,
optimizer, units and clipping, in fp64 if the plan names no precision, after its first steps.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer
from rich.console import Console

from shardwise.cli.configured import CONFIG, JSON, MODEL, PLAN, SEQUENCE, PlannedModel, configured
from shardwise.cli.predict_table import answer, show
from shardwise.core.errors import InputError, bad
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.words import read_size
from shardwise.core.tools.arguments import choice, integer
from shardwise.prediction.cluster import cluster_of

if TYPE_CHECKING:
    from shardwise.cli.predict_timeline import StepMemory
    from shardwise.engine.options import EngineOptions
    from shardwise.models.trainable import Trainable
    from shardwise.prediction.cluster import Cluster
    from shardwise.prediction.prediction import Prediction

ROWS = 2  # per microbatch
CLUSTER: Final = typer.Option(
    metavar="CLUSTER", help="a100-80gb, h100-sxm, h200, b200 or a file, for a step's time."
)
TABLE: Final = typer.Option(metavar="FILE", help="Styles by module, TOML or JSON.")
DEVICE: Final = typer.Option(
    help="cpu or cuda: the device whose kernels are modelled. Default: that of the cluster, or cpu."
)
TIMELINE: Final = typer.Option(metavar="FILE", help="Draw the memory of a step, as .svg or .png.")


def predict_command(
    plan: Annotated[str | None, PLAN] = None,
    *,
    model: Annotated[str | None, MODEL] = None,
    batch: Annotated[
        int | None, typer.Option(help="Rows of the rank's batch; 2 a microbatch if not given.")
    ] = None,
    sequence: Annotated[int | None, SEQUENCE] = None,
    rank: Annotated[int, typer.Option(help="The rank to predict.")] = 0,
    table: Annotated[Path | None, TABLE] = None,
    cluster: Annotated[str | None, CLUSTER] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of a device: 80GiB. Default: the plan's, the cluster's, or the GPU's.",
        ),
    ] = None,
    config: Annotated[Path | None, CONFIG] = None,
    timeline: Annotated[Path | None, TIMELINE] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the memory of a step too, on local ranks.")
    ] = False,
    device: Annotated[str | None, DEVICE] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Predict the memory and the traffic of any rank of a plan, without starting a process."""
    began = time.perf_counter()
    timing = None if cluster is None else cluster_of(cluster)
    device = device or ("cuda" if timing is not None and timing.device.asynchronous else "cpu")
    choice("--device", device, ("cpu", "cuda"))
    run = configured(config, plan, model)
    request = predict_request(run, batch, sequence, rank, table, device)
    found, step = _predicted(request, rank, timeline, device if measure else None)
    rows, size = run.batch if batch is None else None, _device_bytes(device_memory, timing)
    told = answer(found, request.batch, size, rows=rows, device=run.device)
    numbers = numbers_of(found, run.name, began, timing)
    if as_json:
        print(json.dumps(numbers | told.as_json() | ({} if step is None else step.as_json())))
    else:
        show(numbers, told, new_console())
        if step is not None:
            step.show(new_console())
    for note in found.notes:
        print(f"Note: {note}.", file=sys.stderr)


def _predicted(
    request: "PredictRequest", rank: int, file: Path | None, device: str | None
) -> "tuple[Prediction, StepMemory | None]":
    """With the memory of a step, if it is drawn into a file, or measured on a device."""
    if file is None and device is None:
        return request.prediction(rank), None
    from shardwise.cli.predict_timeline import StepMemory, draw, measured_step, predicted_step

    found, events = predicted_step(request, rank, measure=device is not None)
    measured = ((), {}) if device is None else measured_step(request, device)[rank]
    step = StepMemory(events, *measured) if events or device is not None else None
    if file is not None and step is not None:
        draw(file, step.series)
    return found, step


def new_console() -> Console:
    return Console(emoji=False, highlight=False, markup=False)


def numbers_of(
    found: "Prediction", model: str, began: float, cluster: "Cluster | None" = None
) -> dict[str, Any]:
    """What `predict --json` prints of a prediction; `began` is the perf_counter of the command."""
    return {
        "plan": str(found.plan),
        "model": model,
        "world": found.world,
        "rank": found.rank,
        "memory": found.memory_by_tier,
        "bytes": found.bytes,
        "activations": found.activations,
        "host_activations": found.host_activations,
        "fetched": found.fetched,
        "device_peak": found.device_peak,
        "recomputed": dict(found.recomputed),
        "recomputed_flops": found.recomputed_flops,
        "messages": found.messages,
        "seconds": None if cluster is None else found.message_seconds(cluster),
        "step_time": None if cluster is None else found.step_time(cluster).as_json(),
        "time_ms": round(1000 * (time.perf_counter() - began), 1),
    }


class PredictRequest(NamedTuple):
    """A command line as plan, model, a rank's batch, and the options of `parallelize`. `share`
    makes a batch of the same shapes for another data rank. predict_request(*given) makes the same
    request in another process.
    """

    plan: Plan
    trainable: "Trainable"
    batch: Any
    options: "EngineOptions"
    share: Callable[[int], Any]
    given: tuple[Any, ...]

    @property
    def plain(self) -> Any:
        return self.trainable.plain()

    def prediction(self, rank: int) -> "Prediction":
        from shardwise.engine.predict import predict_with

        return predict_with(self.plain, self.plan, self.batch, self.options, rank)


def _device_bytes(text: str | None, cluster: "Cluster | None") -> int | None:
    if text is None:
        return None if cluster is None else cluster.device.memory_bytes
    try:
        return read_size("device_memory", text)
    except InputError:
        allowed = "a whole number from 1 up with its unit, B, KiB, MiB or GiB"
        raise bad(f"--device-memory {text}", allowed, "--device-memory 80GiB") from None


def predict_request(
    run: PlannedModel,
    batch: int | None,
    sequence: int | None,
    rank: int,
    table: Path | None = None,
    device: str = "cpu",
) -> PredictRequest:
    """The values of a command line; a model without a table gets a derived one."""
    plan, name = run.plan, run.name
    if run.config is None:  # a proof's
        plan = replace(plan, precision=plan.precision or "fp64").completed(None)
    for option, value in (("--batch", batch), ("--sequence", sequence)):
        integer(option, 1 if value is None else value, 1, 2)
    integer("--rank", rank, 0, 0, plan.size - 1)

    from shardwise.engine.checks.device_room import AUTO
    from shardwise.engine.predict import predict_with
    from shardwise.models.registry import find
    from shardwise.verify.command import with_table
    from shardwise.verify.inputs import Options, table_in
    from shardwise.verify.oracles import batches

    trainable = find(run.model)
    rows = batch or run.rows or ROWS * plan.microbatches

    def share(data_rank: int) -> Any:
        return resized(trainable.batch(rows, batches.SEED + data_rank), sequence, name)

    made = share(0)
    styles = Options(table=run.table if table is None else table_in(table))
    chosen = with_table(trainable, plan, styles).table
    options = replace(run, plan=plan).options(trainable, chosen, device)
    given = run, batch, sequence, rank, table, device
    request = PredictRequest(plan, trainable, made, options, share, given)
    if plan.offload != AUTO:
        return request
    return request._replace(plan=predict_with(request.plain, plan, made, options).plan)


def resized(batch: Any, sequence: int | None, name: str) -> Any:
    """Repeat or cut dim 1 of the batch's integer tensors to `sequence` positions."""
    if sequence is None:
        return batch
    from torch import Tensor
    from torch.utils._pytree import tree_leaves, tree_map_only

    from shardwise.models.trainable import require_room

    def of_length(x: Tensor) -> Tensor:
        return x.repeat(1, -(-sequence // x.shape[1]))[:, :sequence].contiguous()

    rows = [x for x in tree_leaves(batch) if isinstance(x, Tensor) and _is_text(x)]
    if not rows:
        given = f"--sequence {sequence} for the model {name}, whose batch has no sequences"
        raise bad(given, "--sequence for models of text [rows, positions]", "no --sequence")
    what = f"a batch of {len(rows[0])} rows and --sequence {sequence} for the model {name}"
    require_room(what, rows, sequence / rows[0].shape[1])
    return tree_map_only(Tensor, lambda x: of_length(x) if _is_text(x) else x, batch)


def _is_text(x: Any) -> bool:
    return x.dim() == 2 and not x.is_floating_point()
