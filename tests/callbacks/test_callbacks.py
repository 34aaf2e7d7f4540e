"""Callbacks: when each is called, and what the files of the trackers have after a run, offline."""

import json
import re
import struct
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.callbacks import Callback, Callbacks, RunFacts, callback
from shardwise.comm.world import World
from shardwise.core.errors import InputError, RunError
from shardwise.train import config
from shardwise.train.metrics import Record, tags
from shardwise.train.prepare import RunStart
from tests.pool import run_threads
from tests.train.runs import changed, run, settings

Values = dict[str, dict[int, float]]


class Listed(Callback):
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


def test_an_own_loop_calls_the_same_objects_on_rank_zero():
    """The numbers of `engine.step` by name; the other rank calls nothing unless it is asked."""
    first, second = run_threads(2, trained, 2)
    moments = ["run_began", "step_ended", "step_ended", "run_ended"]
    assert [moment for moment, *_ in first] == moments
    assert first[1][2].keys() == {"loss/train", "optimizer/lr", "bytes/step"}
    assert second == []
    everywhere = run_threads(2, trained, 1, OnAllRanks)
    assert [seen[0] for seen in everywhere] == [("run_began", 0, 0), ("run_began", 1, 0)]


def one_step(callbacks: Callbacks) -> None:
    with callbacks.run("x"):
        callbacks.step_ended(1, {"loss": 1.0})
        callbacks.saved(1, Path("step-1"))


@pytest.mark.parametrize("moment", ["run_began", "step_ended", "saved"])
def test_an_error_of_a_callback_names_it_and_ends_the_others(moment: str):
    """The run raises RunError with the callback, the moment and the error; each one is ended."""
    before, failing, after = Listed(), Listed(moment), Listed()
    callbacks = Callbacks([before, failing, after])
    text = f"The callback Listed failed in {moment}: ValueError: no {moment}"
    with pytest.raises(RunError, match=re.escape(text)):
        one_step(callbacks)
    assert before.seen[-1] == failing.seen[-1] == ("run_ended", RunError)
    assert after.seen == [] or after.seen[-1] == ("run_ended", RunError)


def test_an_optional_callback_that_fails_is_said_once(capfd: pytest.CaptureFixture[str]):
    """Its server is gone for a while: the others get finite numbers, and the run goes on."""

    class Tracker(Listed):
        optional = True

    failing, after = Tracker("step_ended"), Listed()
    callbacks = Callbacks([failing, after])
    with callbacks.run("x"):
        for step in (1, 2):
            callbacks.step_ended(step, {"loss": 1, "none": None, "bad": float("nan")})
    assert after.seen[1:3] == [("step_ended", step, {"loss": 1.0}) for step in (1, 2)]
    said = capfd.readouterr().err
    assert said.count("failed in step_ended: ValueError: no step_ended. The run goes on.") == 1


def test_an_end_that_fails_or_hangs_is_said_and_left(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """The run is over: nothing is raised, no one waits longer than the limit."""
    monkeypatch.setattr(callback, "END_S", 0.05)
    last = Listed()
    with Callbacks([Listed("run_ended"), Listed(ends_s=0.5), last]).run("x"):
        pass
    said = capfd.readouterr().err
    assert "Listed failed in run_ended: ValueError: no run_ended" in said
    assert "TimeoutError: it did not end within 0 s, and was left" in said
    assert last.seen[-1] == ("run_ended", type(None))


@pytest.mark.parametrize(
    ("make", "text"),
    [(sw.callbacks.WandB, "pip install wandb"), (sw.callbacks.MLflow, "pip install mlflow-skinny")],
)
def test_a_tracker_that_is_not_installed_says_how_to_install_it(
    make: Any, text: str, monkeypatch: pytest.MonkeyPatch
):
    """One paragraph, when it is made."""
    monkeypatch.setattr("shardwise.callbacks.trackers.find_spec", lambda _: None)
    with pytest.raises(InputError, match=f"not installed.*{text}"):
        make()


def tracked(folder: Path, *trackers: str) -> config.Config:
    """A run of seven steps, evaluated after 3, 6 and 7, with these trackers."""
    return changed(settings(folder), "run", trackers=trackers)


def wanted(records: Sequence[Record]) -> Values:
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for record in records:
        validation = {"loss/validation": record.validation} if record.validation else {}
        for tag, value in (tags(record) | validation).items():
            found[tag][record.step] = value
    return dict(found)


def test_tensorboard_gets_the_same_numbers(tmp_path: Path):
    """The event files hold every tag of each record at its step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = run(tracked(tmp_path / "run", "tensorboard"))
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    names = events.Tags()["scalars"]
    found = {name: {e.step: e.value for e in events.Scalars(name)} for name in names}
    assert found == {name: pytest.approx(of) for name, of in wanted(records).items()}


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: seven bytes, then blocks of 32 KiB as in LevelDB's log."""
    message = import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # in one piece, or the last of several
            yield message.FromString(whole)
            whole = b""


@pytest.mark.full
def test_wandb_gets_the_same_numbers_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its file has the steps and the configuration; a resumed run keeps its id."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    given = tracked(tmp_path / "run", "wandb")
    records = run(given)
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb")
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    configured: dict[str, Any] = {}
    for each in wandb_records(file):
        own = {"/".join(i.nested_key) or i.key: i.value_json for i in each.history.item}
        for tag in own.keys() - {"step", "_step", "_runtime", "_timestamp"}:
            found[tag][int(own["step"])] = float(own[tag])
        configured |= {e.key: json.loads(e.value_json) for e in each.run.config.update}
    assert found == wanted(records)
    assert configured["train"]["steps"] == 7
    run(changed(given, "train", steps=8), start=RunStart(resume=True))
    runs = [path.name for path in (tmp_path / "run/wandb").glob("offline-run-*")]
    assert {name.rpartition("-")[2] for name in runs} == {file.stem.removeprefix("run-")}


@pytest.mark.full
def test_mlflow_gets_the_same_numbers_from_a_local_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its run has each step and the configuration, and is finished; a resumed run continues it."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    given = tracked(tmp_path / "run", "mlflow")
    records = run(given)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("shardwise")
    (made,) = client.search_runs([experiment.experiment_id])
    found = {
        name: {m.step: m.value for m in client.get_metric_history(made.info.run_id, name)}
        for name in made.data.metrics
    }
    assert found == wanted(records)
    assert (made.info.run_name, made.info.status) == ("run", "FINISHED")
    assert made.data.params["train.steps"] == "7"
    run(changed(given, "train", steps=8), start=RunStart(resume=True))
    (again,) = client.search_runs([experiment.experiment_id])
    assert len(client.get_metric_history(again.info.run_id, "loss/train")) == 8


def no_login(patch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    def refuses(**_: Any) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login`")

    patch.setattr(wandb, "init", refuses)


def no_store(patch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    patch.setenv("MLFLOW_TRACKING_URI", "nowhere://x")


@pytest.mark.parametrize(
    ("tracker", "missing", "phrase"),
    [
        ("wandb", no_login, "WANDB_MODE=offline"),
        ("mlflow", no_store, r"nowhere://x.*MLFLOW_TRACKING_URI="),
    ],
)
def test_a_tracker_that_cannot_start_is_answered_in_a_paragraph(
    tracker: str, missing: Any, phrase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It names the reason, and what to set."""
    missing(monkeypatch)
    with pytest.raises(InputError, match=phrase) as error:
        run(tracked(tmp_path / "run", tracker))
    assert len(str(error.value).splitlines()) == 1
