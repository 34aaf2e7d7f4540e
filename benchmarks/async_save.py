"""The suite `save`: what an asynchronous save every 50 steps adds to the time of a step.

A round has 50 steps without a save and 50 steps that begin with one, in an order that alternates.
The files are written to a temporary folder.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.contenders.contender import stack
from benchmarks.table import aligned
from shardwise.comm.start.launch import spawn
from shardwise.comm.world import World

EVERY: Final = 50  # steps
ROWS: Final = 512
ROUNDS: Final = 10
PLAN: Final = "zero3 fp32"


@dataclass
class SaveLine:
    """Medians over rounds, of rank 0.

    step_s    a step without a save
    ratio     the time of steps with a save over that of the steps without, in the same round
    held_s    the time that `sw.async_save` took
    write_s   the time until it was published
    """

    plan: str
    ranks: int
    parameters: int
    rounds: int
    step_s: float
    ratio: float
    held_s: float
    write_s: float


def run(count: int, ranks: int, rounds: int | None) -> list[SaveLine]:
    """Measure in new processes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, count, ROUNDS if rounds is None else rounds, EVERY)
        return [spawn(rank, ranks, arguments)[0]]


def rank(folder: str, count: int, rounds: int, every: int) -> SaveLine:
    """The measurement of a process."""
    world = sw.init("cpu")
    found = compare(world, folder, count, rounds, every)
    world.close()
    return found


def compare(world: World, folder: str, count: int, rounds: int, every: int) -> SaveLine:
    """Both kinds of steps, in turns.  All ranks call it."""
    model = stack(count)
    numel, width = sum(p.numel() for p in model.parameters()), next(model.parameters()).shape[0]
    engine = sw.parallelize(model, PLAN, world, optimizer=sw.AdamW(lr=1e-4), loss=_square)
    batch = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(world.rank))
    engine.step(batch)
    sw.async_save(engine, folder, keep=1).result()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    held: list[float] = []
    writes: list[float] = []
    for turn in range(rounds):
        for saves in (False, True) if turn % 2 else (True, False):
            world.barrier()
            began_s = time.perf_counter()
            pending = sw.async_save(engine, folder, keep=1) if saves else None
            held += [time.perf_counter() - began_s] if saves else []
            for _ in range(every):
                engine.step(batch)
            seconds[saves].append(time.perf_counter() - began_s)
            if pending is not None:
                pending.result()
                writes.append(pending.write_s)
    pairs = zip(seconds[True], seconds[False], strict=True)
    return SaveLine(
        plan=str(engine.plan),
        ranks=world.size,
        parameters=numel,
        rounds=rounds,
        step_s=statistics.median(seconds[False]) / every,
        ratio=statistics.median(one / other for one, other in pairs),
        held_s=statistics.median(held),
        write_s=statistics.median(writes),
    )


def _square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def as_text(rows: Sequence[SaveLine]) -> str:
    """A table."""
    cells: list[tuple[str, ...]] = [("", "step ms", "with saves", "held ms", "written ms")]
    for row in rows:
        times = (row.held_s, row.write_s)
        name = f"{row.plan}, {row.ranks} rank{'s' * (row.ranks > 1)}, {row.parameters:,} parameters"
        step = f"{row.step_s * 1e3:.1f}"
        cells.append((name, step, f"x {row.ratio:.3f}", *(f"{t * 1e3:.0f}" for t in times)))
    return "\n".join(aligned(cells))
