"""Callbacks: when each is called, on which ranks, and what an error of one does."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.callbacks import Callback, Callbacks, RunFacts, callback, installed
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError, RunError
from tests.pool import run_threads


class Listed(Callback):
    """Lists what it is called with."""

    def __init__(self, fails: str = "", ends_s: float = 0.0) -> None:
        self.seen: list[Any] = []
        self.fails, self.ends_s = fails, ends_s

    def _see(self, moment: str, *facts: Any) -> None:
        self.seen.append((moment, *facts))
        if self.fails == moment:
            raise ValueError(f"no {moment}")

    def run_began(self, run: RunFacts) -> None:
        self._see("run_began", run.rank, run.step)

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> None:
        self._see("step_ended", step, metrics)

    def saved(self, step: int, path: Path) -> None:
        self._see("saved", step, path.name)

    def run_ended(self, error: BaseException | None) -> None:
        time.sleep(self.ends_s)
        self._see("run_ended", type(error))


class OnAllRanks(Listed):
    all_ranks: ClassVar[bool] = True


def trained(world: World, steps: int, kind: type[Listed] = Listed) -> list[Any]:
    """An own loop with one callback; what it was called with."""
    torch.manual_seed(0)
    engine = sw.parallelize(nn.Linear(4, 2), "ddp", world, loss=lambda m, x: m(x).square().mean())
    listed = kind()
    callbacks = Callbacks([listed], world)
    with callbacks.run("runs/x", engine=engine):
        for _ in range(steps):
            callbacks.step_ended(engine.steps, engine.step(torch.ones(2, 4)))
    return listed.seen


def test_an_own_loop_calls_the_same_objects_on_rank_zero() -> None:
    """The numbers of `engine.step` by name; the other rank calls nothing unless it is asked."""
    first, second = run_threads(2, trained, 2)
    assert [moment for moment, *_ in first] == [
        "run_began",
        "step_ended",
        "step_ended",
        "run_ended",
    ]
    assert first[1][2].keys() == {"loss/train", "optimizer/lr", "bytes/step"}
    assert second == []
    everywhere = run_threads(2, trained, 1, OnAllRanks)
    assert [seen[0] for seen in everywhere] == [("run_began", 0, 0), ("run_began", 1, 0)]


def one_step(callbacks: Callbacks) -> None:
    """A run of one step, which is saved."""
    with callbacks.run("x"):
        callbacks.step_ended(1, {"loss": 1.0})
        callbacks.saved(1, Path("step-1"))


@pytest.mark.parametrize("moment", ["run_began", "step_ended", "saved"])
def test_an_error_of_a_callback_names_it_and_ends_the_others(moment: str) -> None:
    """The run raises RunError with the callback, the moment and the error; each one is ended."""
    before, failing, after = Listed(), Listed(moment), Listed()
    callbacks = Callbacks([before, failing, after])
    text = f"The callback Listed failed in {moment}: ValueError: no {moment}"
    with pytest.raises(RunError, match=re.escape(text)):
        one_step(callbacks)
    assert before.seen[-1] == failing.seen[-1] == ("run_ended", RunError)
    assert after.seen == [] or after.seen[-1] == ("run_ended", RunError)


def test_an_optional_callback_that_fails_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    """A tracker whose server is gone for a while: the others are called, and the run goes on."""

    class Tracker(Listed):
        optional = True

    failing, after = Tracker("step_ended"), Listed()
    callbacks = Callbacks([failing, after])
    with callbacks.run("x"):
        for step in (1, 2):
            callbacks.step_ended(step, {"loss": 1.0})
    assert [moment for moment, *_ in after.seen].count("step_ended") == 2
    said = capfd.readouterr().err
    assert said.count("failed in step_ended: ValueError: no step_ended. The run goes on.") == 1


def test_an_end_that_fails_or_hangs_is_said_and_left(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run is over: nothing is raised, no one waits longer than the limit."""
    monkeypatch.setattr(callback, "END_S", 0.05)
    last = Listed()
    with Callbacks([Listed("run_ended"), Listed(ends_s=0.5), last]).run("x"):
        pass
    said = capfd.readouterr().err
    assert "Listed failed in run_ended: ValueError: no run_ended" in said
    assert "TimeoutError: it did not end within 0 s, and was left" in said
    assert last.seen[-1] == ("run_ended", type(None))


def test_what_is_none_or_not_finite_is_left_out() -> None:
    """A callback gets finite numbers alone."""
    listed = Listed()
    Callbacks([listed], alone()).step_ended(3, {"a": 1, "b": None, "c": float("nan")})
    assert listed.seen == [("step_ended", 3, {"a": 1.0})]


def test_an_object_that_is_no_callback_is_refused() -> None:
    """Without a method, or a class where an object belongs: before the run begins."""
    with pytest.raises(InputError, match="without run_began, step_ended"):
        Callbacks([object()])  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"a class.*Mine\(\)"):
        Callbacks([Listed])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("make", "text"),
    [(sw.callbacks.WandB, "pip install wandb"), (sw.callbacks.MLflow, "pip install mlflow-skinny")],
)
def test_a_tracker_that_is_not_installed_says_how_to_install_it(
    make: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One paragraph, when it is made."""
    monkeypatch.setattr(installed, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=f"not installed.*{text}"):
        make()
