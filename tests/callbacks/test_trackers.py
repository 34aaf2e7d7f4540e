"""Trackers, offline: what a run of `shardwise train` writes is read back from their files."""

import json
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import InputError
from shardwise.train import config
from shardwise.train.measure.metrics import Record, tags
from shardwise.train.prepare import RunStart
from tests.train.runs import run, settings

Values = dict[str, dict[int, float]]


def tracked(folder: Path, *trackers: str) -> config.Config:
    """A run of seven steps, evaluated after 3, 6 and 7, with these trackers."""
    given = settings(folder)
    return given.model_copy(update={"run": given.run.model_copy(update={"trackers": trackers})})


def longer(given: config.Config) -> config.Config:
    """The same run with a step more."""
    return given.model_copy(update={"train": given.train.model_copy(update={"steps": 8})})


def wanted(records: Sequence[Record]) -> Values:
    """The values of the records, by tag and step."""
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for record in records:
        validation = {"loss/validation": record.validation} if record.validation else {}
        for tag, value in (tags(record) | validation).items():
            found[tag][record.step] = value
    return dict(found)


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
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


def test_wandb_gets_the_same_numbers_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    run(longer(given), start=RunStart(resume=True))
    runs = [path.name for path in (tmp_path / "run/wandb").glob("offline-run-*")]
    assert {name.rpartition("-")[2] for name in runs} == {file.stem.removeprefix("run-")}


def test_wandb_without_a_login_is_answered_in_a_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names what to write for a run without the network."""
    wandb = pytest.importorskip("wandb")

    def refuses(**_: Any) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login`")

    monkeypatch.setattr(wandb, "init", refuses)
    with pytest.raises(InputError, match="WANDB_MODE=offline") as error:
        run(tracked(tmp_path / "run", "wandb"))
    assert len(str(error.value).splitlines()) == 1


def test_mlflow_gets_the_same_numbers_from_a_local_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    run(longer(given), start=RunStart(resume=True))
    (again,) = client.search_runs([experiment.experiment_id])
    assert len(client.get_metric_history(again.info.run_id, "loss/train")) == 8


def test_a_store_that_mlflow_cannot_use_is_answered_in_a_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the store, the reason, and what to set."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://x")
    with pytest.raises(InputError, match=r"nowhere://x.*MLFLOW_TRACKING_URI=") as error:
        run(tracked(tmp_path / "run", "mlflow"))
    assert len(str(error.value).splitlines()) == 1
