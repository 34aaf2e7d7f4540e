"""Small runs for the tests of the loop: worlds of one and of several gloo processes."""

import io
import operator
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError, RunError
from shardwise.engine.engine import Engine
from shardwise.models import gpt
from shardwise.train import config, end, loop
from shardwise.train.measure.metrics import Record, read
from shardwise.train.prepare import PreparedRun, RunStart
from shardwise.train.report.summary import RankCost
from tests.pool import run_gloo

Change = Callable[[World], None]


def settings(folder: Path, plan: str = "fp64", **train: Any) -> config.Config:
    """A run of seven steps over a text so short that it is read more than once.

    Of 17 sequences an epoch, five a step, the last batch of an epoch has two.
    """
    text = folder.parent / "text"
    text.mkdir(exist_ok=True)
    (text / "a.txt").write_text("".join(f"{n * n} is the square of {n}. " for n in range(11)))
    sizes = {"layers": 2, "width": 16, "heads": 2, "hidden": 24, "sequence": 13}
    steps = {"steps": 7, "batch": 5, "warmup": 2, "lr": 0.01, "eval_every": 3, "save_every": 2}
    return config.build(
        {
            "model": sizes,
            "data": {"source": str(text), "validation": 0.15},
            "train": {**steps, **train},
            "plan": {"text": plan},
            "sample": {"tokens": 5},
            "run": {"folder": str(folder), "trackers": [], "device": "cpu"},
        }
    )


def run(given: config.Config, ranks: int = 1, start: RunStart | None = None) -> list[Record]:
    """Train; the records of the run's folder."""
    if ranks == 1:
        trained(alone(), given, start)
    else:
        run_gloo(ranks, trained, given, start)
    return read(given.folder)


def trained(world: World, given: config.Config, start: RunStart | None) -> str:
    """Train; the sample on rank 0."""
    summary = loop.train(given, world, start)
    return summary.sample if summary else ""


def said(world: World, given: config.Config) -> str:
    """Resume; what was said, and nothing was trained."""
    out = io.StringIO()
    assert loop.train(given, world, RunStart(resume=True), Console(file=out, width=300)) is None
    return out.getvalue()


def costed(world: World, given: config.Config, start: RunStart | None) -> RankCost | None:
    """Train; what rank 0 held and sent in the last step, on rank 0."""
    summary = loop.train(given, world, start)
    return summary.costs[0] if summary else None


def signalled(world: World, given: config.Config, rank: int, step: int) -> bool:
    """Train, with SIGTERM sent to one rank in one step; whether that rank's run ended with it."""
    told = loop.tell

    def tell(run: loop.Run, record: Record) -> None:
        told(run, record)
        if world.rank == rank and record.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    loop.tell = tell
    try:
        loop.train(given, world)
    finally:
        loop.tell = told
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def poisoned(
    world: World, given: config.Config, rank: int, step: int, gradient: bool = False
) -> str:
    """Train, with one rank's loss made NaN in one step, or its gradient alone; the error."""
    called, built, engines = gpt.loss, loop.build, list[Engine]()

    def poison(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = called(module, batch)
        bad = world.rank == rank and torch.is_grad_enabled() and engines[0].steps == step - 1
        if gradient:  # nothing, and its slope is infinite times zero
            return loss + (loss * 0).sqrt() if bad else loss
        return loss * float("nan") if bad else loss

    def build(prepared: PreparedRun, world: World) -> Engine:
        engines.append(built(prepared, world))
        return engines[0]

    gpt.loss, loop.build = poison, build
    try:
        loop.train(given, world)
    except RunError as error:
        return str(error)
    finally:
        gpt.loss, loop.build = called, built
    return ""


def on_a_full_disk(world: World, given: config.Config, where: str) -> tuple[str, str]:
    """Train, with a disk that is full in a function that rank 0 calls; the error of each rank."""
    base, _, name = where.rpartition(".")
    place = operator.attrgetter(base)(loop)
    called = getattr(place, name)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    setattr(place, name, full)
    try:
        loop.train(given, world)
    except (InputError, RunError) as error:
        return type(error).__name__, str(error)
    finally:
        setattr(place, name, called)
    return "", ""


def stopped_early(
    world: World, given: config.Config, rank: int, where: str, start: RunStart | None
) -> tuple[bool, str]:
    """Train, with SIGTERM sent to one rank in a function of the loop; no summary, what was said."""
    called = getattr(loop, where)

    def signalled_in(*args: Any) -> Any:
        if world.rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return called(*args)

    said = io.StringIO()
    setattr(loop, where, signalled_in)
    try:
        summary = loop.train(given, world, start, Console(file=said, width=200))
    finally:
        setattr(loop, where, called)
    return summary is None, said.getvalue()


def stopped_at_the_end(world: World, given: config.Config, rank: int, where: str) -> None:
    """Train, with SIGTERM sent to one rank at the beginning of a function of the run's end."""
    called = getattr(end, where)

    def signalled_in(*args: Any) -> Any:
        if world.rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return called(*args)

    setattr(end, where, signalled_in)
    try:
        assert loop.train(given, world) is None
    finally:
        setattr(end, where, called)
