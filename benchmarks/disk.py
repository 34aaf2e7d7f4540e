"""The suite `disk`: states on a disk, beside what the disk gives alone, measured in turn.

    the disk alone | a step | the disk alone | a step | ...        for optim@disk, then param@disk

A step is in use of the disk while some request of a rank is under way (comm/tiers/disk.py). Its
rates are those of that time; its share is that rate over the mean of what the disk gave before and
after the step. The rate of the whole step counts also the time in which it asks nothing.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.contenders.contender import LEARNING_RATE, WEIGHT_DECAY, stack
from benchmarks.table import aligned
from shardwise.comm.move import all_gather_object
from shardwise.comm.start.launch import spawn
from shardwise.comm.tiers.disk import Used
from shardwise.comm.tiers.disk_bandwidth import FILE_BYTES, DiskBandwidth, measure
from shardwise.comm.world import World

ROUNDS: Final = 5
ROWS: Final = 64  # of a rank's batch
WORDS: Final = ("offload:optim@disk", "offload:param@disk")
MIB: Final = 2**20


@dataclass(frozen=True)
class Turn:
    """A step of all ranks: their use of the disk together, its time, and the disk beside it."""

    used: Used
    step_s: float
    alone: tuple[DiskBandwidth, DiskBandwidth]

    def share(self, rate: float, of: Callable[[DiskBandwidth], float]) -> float:
        """A rate over the mean of what the disk gave before and after."""
        return rate / statistics.mean(map(of, self.alone))


@dataclass(frozen=True)
class DiskLine:
    """A row: medians over steps. Rates are of all ranks, in bytes a second; times of the slowest.

    waited_s, updated_s  of a step, the time in which it waited for the disk, and updated chunks
    step_share           bytes of a step over its whole time, over what the disk gives for both
    """

    plan: str
    ranks: int
    parameters: int
    step_s: float
    waited_s: float
    updated_s: float
    read_bytes: int
    written_bytes: int
    read_bytes_per_s: float
    read_share: float
    write_bytes_per_s: float
    write_share: float
    both_bytes_per_s: float
    both_share: float
    step_share: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    disk_both_bytes_per_s: float


def run(
    folder: Path, count: int, ranks: int, rounds: int | None, file_bytes: int = FILE_BYTES
) -> list[DiskLine]:
    """Measure in new processes. Raises InputError for a folder that cannot be written."""
    option = "python -m benchmarks disk"
    measure(folder, file_bytes, option)  # for its errors; also allocates blocks of the disk
    steps = ROUNDS if rounds is None else rounds
    return spawn(rank, ranks, (str(folder), count, steps, file_bytes))[0]


def rank(folder: str, count: int, rounds: int, file_bytes: int) -> list[DiskLine]:
    """One rank's part."""
    return compare(sw.init("cpu"), folder, count, rounds, file_bytes)


def compare(world: World, folder: str, count: int, rounds: int, file_bytes: int) -> list[DiskLine]:
    """The rows, on every rank."""
    found: list[DiskLine] = []
    for words in WORDS:
        plan = f"dp{world.size} zero3 fp32 {words}"
        model = stack(count)
        numel, features = sum(p.numel() for p in model.parameters()), next(model.parameters()).shape
        engine = sw.parallelize(
            model,
            plan,
            world,
            optimizer=sw.AdamW(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
            loss=_square,
            offload_folder=folder,
        )
        batch = torch.randn(ROWS, features[1], generator=torch.Generator().manual_seed(world.rank))
        engine.step(batch)  # makes the optimizer's state
        turns, before = list[Turn](), _alone(folder, file_bytes, world)
        for index in range(rounds):
            if world.rank == 0:
                print(f"{words}: step {index + 1} of {rounds}", file=sys.stderr, flush=True)
            used, step_s = _step(engine, batch)
            after = _alone(folder, file_bytes, world)
            turns.append(Turn(used, step_s, (before, after)))
            before = after
        found.append(_line(plan, world.size, numel, turns))
    return found


def _square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _alone(folder: str, file_bytes: int, world: World) -> DiskBandwidth:
    """What the disk gives to rank 0 while the others wait."""
    found = measure(Path(folder), file_bytes) if world.rank == 0 else None
    first, *_ = all_gather_object(found, world)
    assert first is not None
    return first


def _step(engine: sw.Engine, batch: Tensor) -> tuple[Used, float]:
    """A step and the end of its writes: the use of all ranks, and the time of the slowest."""
    disk = engine.disk
    assert disk is not None
    disk.sync()
    engine.world.barrier()
    before, began_s = disk.use.so_far, time.perf_counter()
    engine.step(batch)
    disk.sync()
    own = disk.use.so_far - before, time.perf_counter() - began_s
    every = all_gather_object(own, engine.world)
    uses = [used for used, _ in every]
    of_bytes = [
        sum(values) for values in zip(*((u.read_bytes, u.written_bytes) for u in uses), strict=True)
    ]
    seconds = ((u.read_s, u.written_s, u.busy_s, u.waited_s, u.updated_s) for u in uses)
    slowest = [max(values) for values in zip(*seconds, strict=True)]
    return Used(*of_bytes, *slowest), max(step_s for _, step_s in every)


def _line(plan: str, ranks: int, numel: int, turns: Sequence[Turn]) -> DiskLine:
    def median(of: Callable[[Turn], float]) -> float:
        return statistics.median(map(of, turns))

    def read(turn: Turn) -> float:
        return turn.used.read_bytes / turn.used.read_s

    def written(turn: Turn) -> float:
        return turn.used.written_bytes / turn.used.written_s

    def busy(turn: Turn) -> float:
        return (turn.used.read_bytes + turn.used.written_bytes) / turn.used.busy_s

    def whole(turn: Turn) -> float:
        return (turn.used.read_bytes + turn.used.written_bytes) / turn.step_s

    used = turns[-1].used  # bytes are the same in each step
    return DiskLine(
        plan,
        ranks,
        numel,
        step_s=median(lambda t: t.step_s),
        waited_s=median(lambda t: t.used.waited_s),
        updated_s=median(lambda t: t.used.updated_s),
        read_bytes=used.read_bytes,
        written_bytes=used.written_bytes,
        read_bytes_per_s=median(read),
        read_share=median(lambda t: t.share(read(t), lambda a: a.read_bytes_per_s)),
        write_bytes_per_s=median(written),
        write_share=median(lambda t: t.share(written(t), lambda a: a.write_bytes_per_s)),
        both_bytes_per_s=median(busy),
        both_share=median(lambda t: t.share(busy(t), lambda a: a.both_bytes_per_s)),
        step_share=median(lambda t: t.share(whole(t), lambda a: a.both_bytes_per_s)),
        disk_read_bytes_per_s=median(lambda t: t.alone[0].read_bytes_per_s),
        disk_write_bytes_per_s=median(lambda t: t.alone[0].write_bytes_per_s),
        disk_both_bytes_per_s=median(lambda t: t.alone[0].both_bytes_per_s),
    )


def as_text(rows: Sequence[DiskLine]) -> str:
    """Two tables: where the time of a step goes, and the disk in MiB/s with its shares."""
    first: list[tuple[str, ...]] = [
        ("a step, ms", "all", "waits", "update", "rest", "read MiB", "written", "")
    ]
    second: list[tuple[str, ...]] = [
        ("MiB/s, share", "reads", "", "writes", "", "both", "", "whole step", "")
    ]
    for row in rows:
        rest_s = row.step_s - row.waited_s - row.updated_s
        times = (row.step_s, row.waited_s, row.updated_s, rest_s)
        counts = (row.read_bytes, row.written_bytes)
        first.append(
            (row.plan, *(f"{t * 1e3:.0f}" for t in times), *(f"{n / MIB:.0f}" for n in counts), "")
        )
        rates = (row.read_bytes_per_s, row.write_bytes_per_s, row.both_bytes_per_s)
        shares = (row.read_share, row.write_share, row.both_share)
        pairs = [(f"{r / MIB:.0f}", f"{s:.0%}") for r, s in zip(rates, shares, strict=True)]
        second.append((row.plan, *(x for pair in pairs for x in pair), f"{row.step_share:.0%}", ""))
        gives = (row.disk_read_bytes_per_s, row.disk_write_bytes_per_s, row.disk_both_bytes_per_s)
        alone = [x for rate in gives for x in (f"{rate / MIB:.0f}", "")]
        second.append(("  the disk alone", *alone, "", ""))
    title = f"{rows[0].parameters:,} parameters, {rows[0].ranks} rank" + "s" * (rows[0].ranks > 1)
    return "\n".join([title, *aligned(first), "", *aligned(second)])
