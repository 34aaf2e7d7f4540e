"""`shardwise predict --timeline FILE` and `--measure`: the memory of a rank, moment by moment.

The first step is not typical, since it allocates gradients and optimizer states. A measurement
trains three steps on local ranks and measures the third.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli.predict_command import PredictRequest, predict_request
from shardwise.core.schedule.draw import save
from shardwise.core.zero import GATHERED, KEPT, PREDICTED, TEMPORARY, Event
from shardwise.train.progress import unit_of
from shardwise.train.run_report import new_figure

if TYPE_CHECKING:
    import torch

    from shardwise.comm.world import World
    from shardwise.engine.engine import Engine
    from shardwise.prediction.prediction import Prediction

    Measured = tuple[list[Event], dict[str, int]]

COLOURS: Final[dict[str, str]] = {
    "parameters": "#2a6f97",
    GATHERED: "#89c2d9",
    "gradients": "#f4a259",
    "optimizer": "#8f5a9e",
    "buffers": "#b0b0b0",
    KEPT: "#5b8c5a",
    TEMPORARY: "#d0d0d0",
}
NOT_PREDICTED: Final = "not predicted"
ALLOCATOR = ("reserved_bytes", "allocated_bytes", "inactive_split_bytes")
STEPS = 3  # of a measurement; the last one is measured


class Series(NamedTuple):
    """The events of one step, under a title."""

    title: str
    events: Sequence[Event]

    @property
    def highest(self) -> Event:
        return max(self.events, key=lambda event: event.total)


class StepMemory(NamedTuple):
    """The memory of a rank in a step: `predicted` and `measured` events, each may be empty.
    `allocator` has the highest values of CUDA's caching allocator.
    """

    predicted: Sequence[Event]
    measured: Sequence[Event]
    allocator: dict[str, int]

    @property
    def series(self) -> list[Series]:
        named = {"predicted": self.predicted, "measured": self.measured}
        return [Series(title, events) for title, events in named.items() if events]

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        found: dict[str, Any] = {
            one.title: {
                "peak": {"bytes": one.highest.total, "at": str(one.highest)},
                "events": [_event(one.title, event) for event in one.events],
            }
            for one in self.series
        }
        return found | ({"allocator": self.allocator} if self.allocator else {})

    def show(self, console: Console) -> None:
        """Print the peaks of each series, and what CUDA's allocator held."""
        console.print(peaks(self.series))
        if self.allocator:
            table = Table("CUDA's allocator, at most", "bytes", "of reserved")
            reserved = max(1, self.allocator["reserved_bytes"])
            for name, count in self.allocator.items():
                table.add_row(name, f"{count:,}", f"{count / reserved:.1%}")
            console.print(table)


def predicted_step(
    wanted: PredictRequest, rank: int, *, measure: bool
) -> "tuple[Prediction, Sequence[Event]]":
    """The prediction for a rank, and the events of a step."""
    from shardwise.comm.start.rendezvous import require_local
    from shardwise.models.trainable import WEIGHT_BYTES
    from shardwise.observe.dry_twin import predict_events

    if measure:  # before a prediction, which may take long
        require_local(wanted.plan.size)
        wanted.trainable.require_memory(WEIGHT_BYTES * wanted.plan.size)
    options = replace(wanted.options, tokens=wanted.trainable.tokens)
    return predict_events(wanted.plain, wanted.plan, wanted.batch, options, rank)


def measured_step(wanted: PredictRequest, device: str) -> "list[Measured]":
    """The events of a step, and the values of CUDA's allocator, on each of new local ranks."""
    from shardwise.comm.start.launch import spawn

    ranks = wanted.plan.size
    with Console(stderr=True).status(Text(f"{wanted.plan}: {STEPS} steps on {ranks} ranks")):
        return spawn(_measure_step, ranks, (*wanted.given, device), device=device)


def _measure_step(*given: Any) -> "Measured":
    from shardwise.comm.world import init
    from shardwise.observe.meter import measuring

    *request, device = given
    world, wanted = init(device), predict_request(*request)
    engine, batch = engine_on(wanted, world)
    for _ in range(STEPS - 1):
        engine.step(batch)
    with measuring(engine, batch) as meter:
        engine.step(batch)
    world.barrier()
    return meter.events, _allocator(world.device)


def engine_on(request: PredictRequest, world: "World") -> "tuple[Engine, Any]":
    """An engine on this rank, and its share of the batch."""
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    from shardwise.engine.parallelize import build_engine

    folder, tokens = tempfile.gettempdir(), request.trainable.tokens
    options = replace(request.options, tokens=tokens, offload_folder=folder)
    engine = build_engine(request.trainable.build(), request.plan, world, options)
    share = request.share(engine.data_rank)
    return engine, tree_map_only(Tensor, lambda x: x.to(world.device), share)


def _allocator(device: "torch.device") -> dict[str, int]:
    """The peaks of CUDA's caching allocator; nothing for other devices."""
    from torch import cuda

    if device.type != "cuda":
        return {}
    found = cuda.memory_stats(device)
    return {name: found[f"{name}.all.peak"] for name in ALLOCATOR}


def _event(title: str, event: Event) -> dict[str, Any]:
    return {k: v for k, v in event._asdict().items() if k != "peak" or title == "measured"}


def peaks(series: Sequence[Series]) -> Table:
    """By category, the most bytes at an event, and the event."""
    table = Table("bytes at the most", *(one.title for one in series))
    highest = [max(one.events, key=lambda event: event.peak) for one in series]
    between = (
        f"{event.peak:,} before {event}" if TEMPORARY in event.by_category else NOT_PREDICTED
        for event in highest
    )
    for category in COLOURS:
        table.add_row(category, *(_most(one, category) for one in series))
    table.add_row("all", *(f"{one.highest.total:,} {one.highest}" for one in series))
    table.add_row("all, between events", *between)
    return table


def _most(series: Series, category: str) -> str:
    most = max(series.events, key=lambda event: event.by_category.get(category, 0))
    if category not in most.by_category:
        return NOT_PREDICTED
    return f"{most.by_category[category]:,} {most if most.by_category[category] else ''}".strip()


def draw(path: Path, series: Sequence[Series]) -> None:
    """Draw the series above each other to one scale, as .svg or .png by the file's ending."""
    most = max(max(event.total, event.peak) for one in series for event in one.events)
    unit, unit_bytes = unit_of(most)
    figure = new_figure(9, 0.6 + 3.4 * len(series))
    for axes, one in zip(figure.subplots(len(series), squeeze=False)[:, 0], series, strict=True):
        stored = [event.by_category for event in one.events]
        shown = [c for c in (*PREDICTED, TEMPORARY) if any(found.get(c) for found in stored)]
        at = range(len(one.events))
        sizes = [[found.get(c, 0) / unit_bytes for found in stored] for c in shown]
        axes.stackplot(at, sizes, labels=shown, colors=[COLOURS[c] for c in shown], step="mid")
        if TEMPORARY in shown:
            highest = [event.peak / unit_bytes for event in one.events]
            axes.step(
                at, highest, where="mid", color="black", linewidth=0.8, label="most before it"
            )
        axes.set(title=one.title, ylabel=unit, ylim=(0, 1.2 * most / unit_bytes))
        apart = -(-len(one.events) // 32)
        names = [str(event) for event in one.events][::apart]
        axes.set_xticks([*at][::apart], names, rotation=90, fontsize=7)
        axes.legend(frameon=False, fontsize=7, ncols=4, loc="upper left")
    save(figure, path, "--timeline step.svg")
