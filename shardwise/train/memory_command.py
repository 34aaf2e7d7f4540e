"""`shardwise memory PLAN`: the picture of a step; with --table, ZeRO's table for any model.

The run is that of `shardwise predict PLAN`, and the step is not the first one, which allocates
gradients and optimizer states. --measure trains three steps on local ranks, and measures the third.
"""

import inspect
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.core.arguments import choice
from shardwise.core.errors import bad
from shardwise.core.optimizers import SIDE, STAGES, gigabytes, k_bytes, zero_table
from shardwise.train.configured import configured
from shardwise.train.predict_command import PredictRequest, predict_request

if TYPE_CHECKING:
    import torch

    from shardwise.core.plan import Plan
    from shardwise.prediction.first_fit import Placement
    from shardwise.prediction.prediction import Prediction
    from shardwise.prediction.timeline import Event
    from shardwise.train.memory_picture import Series

    Measured = tuple[list[Event], dict[str, Placement], dict[str, int]]

HEADS = ("P_os (zero1)", "P_os+g (zero2)", "P_os+g+p (zero3)")
AS_ALLOCATED, IN_ARENA = "as the step allocates", "long-lived tensors in an arena"
ALLOCATOR = ("reserved_bytes", "allocated_bytes", "inactive_split_bytes")
MOST = 1e18  # parameters or ranks in ZeRO's table
STEPS = 3  # of a measurement; the last one is measured


@dataclass(frozen=True)
class Request:
    """The options of `shardwise memory`."""

    plan: Annotated[
        str | None, typer.Argument(metavar="[PLAN]", help='Such as "dp8 zero3 bf16".')
    ] = None
    model: Annotated[
        str, typer.Option(help="gpt, llama:70b, hf:NAME, hf:./FOLDER, file.py:build and others.")
    ] = "gpt"
    batch: Annotated[
        int | None, typer.Option(help="Rows of the rank's batch; 2 a microbatch if not given.")
    ] = None
    sequence: Annotated[
        int | None, typer.Option(help="Positions of a row; the model's own if not given.")
    ] = None
    rank: Annotated[int, typer.Option(help="The rank.")] = 0
    styles: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Styles of tensor parallelism.")
    ] = None
    measure: Annotated[
        bool, typer.Option("--measure", help="Also measure a step, on local ranks.")
    ] = False
    device: Annotated[
        str, typer.Option(help="With --measure: cpu, or cuda, with a GPU for each rank.")
    ] = "cpu"
    svg: Annotated[Path | None, typer.Option(help="Draw into this file.")] = None
    png: Annotated[Path | None, typer.Option(help="Draw into this file.")] = None
    table: Annotated[
        bool, typer.Option("--table", help="Print ZeRO's table: bytes a rank by formula alone.")
    ] = False
    params: Annotated[
        str, typer.Option(help="With --table: numbers of parameters, such as 7.5e9,128e9.")
    ] = "7.5e9"
    ranks: Annotated[
        str, typer.Option(help="With --table: numbers of data ranks, such as 1,64,1024.")
    ] = "1,4,16,64,256,1024"
    optimizer: Annotated[
        str, typer.Option(help="With --table: the optimizer, such as adam or lion.")
    ] = "adam"
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False


def memory_command(**given: Any) -> None:
    """Print what a rank stores at each moment of a step: predicted, and measured."""
    request = Request(**given)
    if request.table:
        counts = _numbers("--params", request.params), _numbers("--ranks", request.ranks)
        print_table(*counts, request.optimizer, request.as_json)
    elif request.plan is None:
        plan = 'shardwise memory "dp8 zero3 bf16"'
        raise bad("shardwise memory without a plan", "a plan, or --table", plan)
    else:
        print_step(request, request.plan)


# typer reads the options off a function's signature
memory_command.__signature__ = inspect.signature(Request)


def print_step(request: Request, plan: str) -> None:
    """Print the memory of a step, and draw it if requested.

    Raises InputError for plans that cannot be predicted or started, RankError if a rank fails.
    """
    run = configured(None, plan, request.model)
    given = run, request.batch, request.sequence, request.rank, request.styles
    wanted = predict_request(*given)
    _require_picture(request, wanted.plan)
    found, events = predict_step(wanted, request.rank)
    choice("--device", request.device, ("cpu", "cuda"))
    measured, placements, allocator = (
        _measure_on_ranks(wanted, (*given, request.device))[request.rank]
        if request.measure
        else ([], {}, {})
    )

    from shardwise.prediction.timeline import unpredicted
    from shardwise.train.memory_picture import Series, draw

    series = [Series("predicted", events)] * bool(events)
    series += [Series("measured", measured)] * bool(measured)
    notes = list(found.notes)
    if word := unpredicted(found.plan):
        measure = "" if measured else "; --measure measures them"
        peak = found.device_peak
        notes.append(
            f"the timeline of a step with {word} is not predicted{measure}; its peak on the device "
            f"is about {peak:,} bytes by prediction, temporary memory of kernels apart"
        )
    for path in (request.svg, request.png):
        if path is not None:
            draw(path, series)
    if request.as_json:
        said = _as_json(found, series, request.model, notes)
        first_fit = {name: one._asdict() for name, one in placements.items()}
        said |= {"first_fit": first_fit} if first_fit else {}
        print(json.dumps(said | ({"allocator": allocator} if allocator else {})))
    else:
        _show(found, series, request.model, notes)
        if placements:
            print_placements(placements)
        if allocator:
            print_allocator(allocator)


def _require_picture(request: Request, plan: "Plan") -> None:
    """Raise InputError for a picture of a step that is neither predicted nor measured."""
    from shardwise.prediction.timeline import unpredicted

    word, drawn = unpredicted(plan), request.svg or request.png
    if word and drawn and not request.measure:
        option = "--svg" if request.svg else "--png"
        raise bad(
            f"{option} {drawn} under the plan '{plan}': the timeline of a step with {word} is not "
            "predicted, so there is nothing to draw",
            "--measure, which measures the step on local ranks, or a plan without that word",
            f"{option} {drawn} --measure",
        )


def predict_step(wanted: PredictRequest, rank: int) -> "tuple[Prediction, Sequence[Event]]":
    """The prediction, and the events of a step; none if they are not predicted."""
    from shardwise.engine.timeline import predict_events
    from shardwise.prediction.timeline import unpredicted

    if unpredicted(wanted.plan):
        return wanted.prediction(rank), ()
    return predict_events(wanted.plain, wanted.plan, wanted.batch, wanted.options, rank)


def _measure_on_ranks(wanted: PredictRequest, given: tuple[Any, ...]) -> "list[Measured]":
    """The events of a step, and how an allocator places it, on each of new local ranks."""
    from shardwise.comm.launch import spawn
    from shardwise.comm.local import require_local
    from shardwise.models.trainable import WEIGHT_BYTES

    ranks = wanted.plan.size
    require_local(ranks)
    wanted.trainable.require_memory(WEIGHT_BYTES * ranks)
    with Console(stderr=True).status(Text(f"{wanted.plan}: {STEPS} steps on {ranks} ranks")):
        return spawn(_measure_step, ranks, given, device=given[-1])


def _measure_step(*given: Any) -> "Measured":
    """The last of a few steps on this rank and on a device, each on the same batch."""
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    from shardwise.comm.world import init
    from shardwise.engine.parallelize import build_engine
    from shardwise.engine.timeline import measuring
    from shardwise.engine.trace import Recorder
    from shardwise.prediction.first_fit import LONG, placed

    *request, device = given
    world, wanted = init(device), predict_request(*request)
    folder, tokens = tempfile.gettempdir(), wanted.trainable.tokens
    options = replace(wanted.options, tokens=tokens, offload_folder=folder)
    engine = build_engine(wanted.trainable.build(), wanted.plan, world, options)
    share = wanted.share(engine.data_rank)
    batch = tree_map_only(Tensor, lambda x: x.to(world.device), share)
    for _ in range(STEPS - 1):
        engine.step(batch)
    recorder = Recorder()
    with measuring(engine, batch, recorder) as meter:
        engine.step(batch)
    world.barrier()
    trace = recorder.trace
    placements = {AS_ALLOCATED: placed(trace), IN_ARENA: placed(trace, LONG)}
    return meter.events, placements, _allocator(world.device)


def _allocator(device: "torch.device") -> dict[str, int]:
    """The highest values so far of CUDA's caching allocator; nothing for other devices.

    `inactive_split_bytes` are free, but in blocks of which another part is in use.
    """
    from torch import cuda

    if device.type != "cuda":
        return {}
    found = cuda.memory_stats(device)
    return {name: found[f"{name}.all.peak"] for name in ALLOCATOR}


def _as_json(
    found: "Prediction", series: "Sequence[Series]", model: str, notes: list[str]
) -> dict[str, Any]:
    """Everything as one object; `events` of each series in their order."""
    steps = {
        one.title: {
            "peak": {"bytes": one.highest.total, "at": str(one.highest)},
            "events": [_event(one.title, event) for event in one.events],
        }
        for one in series
    }
    head = {"plan": str(found.plan), "model": model, "world": found.world, "rank": found.rank}
    held = {"between_steps": found.memory_by_tier, "device_peak": found.device_peak}
    return {**head, **held, **steps, "notes": notes}


def _event(title: str, event: "Event") -> dict[str, Any]:
    """The fields that a prediction or a measurement has."""
    absent = "temporary_most" if title == "measured" else "peak"
    return {name: value for name, value in event._asdict().items() if name != absent}


def _show(
    found: "Prediction", series: "Sequence[Series]", model: str, notes: Sequence[str]
) -> None:
    from shardwise.train.memory_picture import legend, on_screen, peaks

    console = Console(emoji=False, highlight=False, markup=False)
    console.print(f"{found.plan} on {model}: rank {found.rank} of {found.world}")
    table = Table("between steps", "bytes")
    for category, count in found.memory_by_tier.items():
        table.add_row(category, f"{count:,}")
    console.print(table)
    if series:
        console.print(peaks(series))
        scale = max(one.highest.total for one in series)
        for one in series:
            console.print(f"\n{one.title}:")
            console.print(on_screen(one, scale))
        console.print(legend())
    for note in notes:
        console.print(f"Note: {note}.")


def print_placements(placements: "dict[str, Placement]") -> None:
    """Print what a first-fit allocator needs for the measured step."""
    table = Table("first-fit allocator", "bytes needed", "over peak", "fragmentation")
    for name, one in placements.items():
        over = f"{one.needed_bytes / one.peak_bytes:.3f}"
        table.add_row(name, f"{one.needed_bytes:,}", over, f"{one.fragmentation:.1%}")
    Console(emoji=False, highlight=False, markup=False).print(table)


def print_allocator(found: dict[str, int]) -> None:
    """Print the statistics of CUDA's allocator."""
    table = Table("CUDA's allocator, at most", "bytes", "of reserved")
    for name, count in found.items():
        table.add_row(name, f"{count:,}", f"{count / max(1, found['reserved_bytes']):.1%}")
    Console(emoji=False, highlight=False, markup=False).print(table)


def print_table(parameters: list[float], ranks: list[float], optimizer: str, as_json: bool) -> None:
    """Print ZeRO's table 1 for these models and numbers of ranks.

    Raises InputError for a number of ranks that is not whole, and for an unknown optimizer.
    """
    if any(n != int(n) for n in ranks):
        given = ",".join(f"{n:g}" for n in ranks)
        raise bad(f"--ranks {given}", "whole numbers from 1 up", "--ranks 1,64,1024")
    k = k_bytes(optimizer)
    lines = list(zero_table(parameters, [int(n) for n in ranks], optimizer))
    if as_json:
        found = [
            {
                "parameters": x.parameters,
                "ranks": x.ranks,
                **dict(zip(STAGES, x.stored_bytes, strict=True)),
            }
            for x in lines
        ]
        print(json.dumps({"optimizer": optimizer, "k_bytes": k, "table": found}))
        return
    console = Console(emoji=False, highlight=False, markup=False)
    title = f"GB a rank: 16-bit weights and gradients, {optimizer} with K = {k:.4g} bytes"
    shown = Table("parameters", "ranks", *HEADS, title=title)
    for line in lines:
        row = map(gigabytes, line.stored_bytes)
        shown.add_row(f"{line.parameters:g}", f"{line.ranks}", *row)
    console.print(shown)
    console.print("ZeRO, arXiv 1910.02054, table 1; 1 GB is 1e9 bytes; activations come on top.")
    if optimizer == "adafactor":
        console.print(f"K is of a matrix of {SIDE} rows and columns.")


def _numbers(option: str, text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or any(not 1 <= n <= MOST for n in found):
        instead = {"--params": "--params 7.5e9,128e9", "--ranks": "--ranks 1,64,1024"}[option]
        raise bad(
            f"{option} {text}", f"numbers from 1 to {MOST:g}, with commas between them", instead
        )
    return found
