"""Small runs for the tests of the loop: worlds of one and of several gloo processes."""

import errno
import importlib
import io
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from shardwise.cli import main as cli
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError, RunError
from shardwise.models import gpt, hf
from shardwise.train import config, loop
from shardwise.train.metrics import Record, read
from shardwise.train.prepare import RunStart
from tests.engine.cases import fails
from tests.pool import run_gloo

Capture = pytest.CaptureFixture[str]


def settings(folder: Path, plan: str = "fp64", **train: Any) -> config.Config:
    """Seven steps of five sequences over a text of 17, which is read more than once."""
    text = folder.parent / "text"
    text.mkdir(exist_ok=True)
    (text / "a.txt").write_text("".join(f"{n * n} is the square of {n}. " for n in range(11)))
    sizes = {"layers": 2, "hidden_size": 16, "heads": 2, "intermediate_size": 24, "sequence": 13}
    steps = {"steps": 7, "batch": 5, "warmup": 2, "lr": 0.01, "eval_every": 3, "save_every": 2}
    return config.build(
        {
            "model": sizes,
            "data": {"source": str(text), "validation": 0.15},
            "train": {**steps, **train},
            "plan": {"text": plan},
            "run": {"folder": str(folder), "trackers": [], "device": "cpu"},
        }
    )


def changed(given: config.Config, section: str, **values: Any) -> config.Config:
    return given.model_copy(update={section: getattr(given, section).model_copy(update=values)})


def pretrained(at: Path, weights: Path, plan: str, **train: Any) -> config.Config:
    base = settings(at, plan, **train).model_dump()
    return config.build(base | {"model": {"name": f"hf:{weights}", "sequence": 13}})


def model_folder(kind: str, at: Path, **sizes: Any) -> Path:
    """A small model of transformers, with a word for every byte, in a folder."""
    transformers = pytest.importorskip("transformers")
    made = hf.small_config(kind)
    made.update({"vocab_size": 257} | sizes)
    torch.manual_seed(0)
    family = "AutoModelForMaskedLM" if kind == "bert" else "AutoModelForCausalLM"
    getattr(transformers, family).from_config(made).save_pretrained(at)
    return at


def ended(capture: Capture, *argv: str) -> tuple[Any, str, str]:
    """The exit code of a command, its output and its error output."""
    with pytest.raises(SystemExit) as leaving:
        cli.main(argv)
    out, err = capture.readouterr()
    return leaving.value.code or 0, out, err


def printed(capture: Capture, *argv: str) -> str:
    """What a command prints that ends with 0."""
    code, out, err = ended(capture, *argv)
    assert code == 0, err
    return out


def run(given: config.Config, ranks: int = 1, start: RunStart | None = None) -> list[Record]:
    """Train; the records of the run's folder."""
    if ranks == 1:
        trained(alone(), given, start)
    else:
        run_gloo(ranks, trained, given, start)
    return read(given.folder)


def trained(world: World, given: config.Config, start: RunStart | None = None) -> None:
    """Train, in a process of a pool."""
    loop.train(given, world, start)


def shown(world: World, given: config.Config, start: RunStart | None = None) -> str:
    """Train; what is shown on rank 0."""
    out = io.StringIO()
    loop.train(given, world, start, Console(file=out, width=300))
    return out.getvalue()


def stopped(
    world: World, given: config.Config, rank: int, where: str, step: int | None = None
) -> str:
    """Train, with SIGTERM to one rank in a function, in that step if any; what is shown."""
    out = io.StringIO()

    def interrupt(*of: Any) -> None:
        if world.rank == rank and step in (None, getattr(of[-1], "step", None)):
            os.kill(os.getpid(), signal.SIGTERM)

    with before(where, interrupt):
        assert loop.train(given, world, console=Console(file=out, width=200)) is None
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return out.getvalue()


def on_a_full_disk(world: World, given: config.Config, where: str) -> tuple[str, str]:
    """Train, with a disk that is full in a function that rank 0 calls; the error of each rank."""
    with before(where, full_disk), pytest.raises((InputError, RunError)) as caught:
        loop.train(given, world)
    return caught.type.__name__, str(caught.value)


full_disk = fails(errno.ENOSPC)


@contextmanager
def before(where: str, act: Callable[..., object]) -> Iterator[None]:
    """Call `act` before each call of a function of the package `train`."""
    place, _, name = f"shardwise.train.{where}".rpartition(".")
    called = getattr(importlib.import_module(place), name)

    def both(*args: Any, **options: Any) -> Any:
        act(*args, **options)
        return called(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{place}.{name}", both)
        yield


def poisoned(world: World, given: config.Config, rank: int, step: int) -> str:
    """Train, with one rank's loss made NaN in one step; the error."""
    called, calls = gpt.loss, itertools.count(1)

    def poison(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = called(module, batch)
        bad = torch.is_grad_enabled() and next(calls) == step and world.rank == rank
        return loss * float("nan") if bad else loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt, "loss", poison)
        try:
            loop.train(given, world)
        except RunError as error:
            return str(error)
    return ""
