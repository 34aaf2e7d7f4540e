"""Predicted seconds of communication: latency x messages + bytes / bandwidth."""

import json
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.core.errors import InputError
from shardwise.doctor.diagnosis import Diagnosis, Finding
from shardwise.doctor.machine import look
from shardwise.doctor.timing import Timing
from shardwise.engine.prediction import predict_with
from shardwise.models.registry import find
from shardwise.prediction.link_time import Cluster, Link
from shardwise.train.cluster import cluster_in
from shardwise.verify.parity import engine_of
from tests.pool import run_threads

SIZES = [2**power for power in range(12, 24, 2)]


def saved(folder: Path) -> Path:
    """The file of a cluster whose all-gathers take 1 ms and 1 ns a byte."""
    timings = [Timing("dp", "all_gather", n, 1e-3 + n / 1e9) for n in SIZES]
    file = folder / "cluster.toml"
    file.write_text(Diagnosis("dp2", [Finding(look(), {}, timings, {})]).toml())
    return file


def test_a_line_has_its_messages_and_bytes() -> None:
    """Of another axis, the same collective is taken; what was not measured has no time."""
    links = Cluster({("dp", "all_gather"): Link(1e-3, 1e9), ("dp", "send"): Link(1e-4, None)})
    found = links.seconds(
        [("dp all_gather", 3, 10**6), ("tp all_gather", 1, 0), ("pp send", 2, 5), ("x new", 1, 1)]
    )
    assert found == pytest.approx({"dp all_gather": 4e-3, "tp all_gather": 1e-3, "pp send": 2e-4})


def test_the_file_of_doctor_is_read(tmp_path: Path) -> None:
    """--save writes what --cluster reads, with the fitted latency and bandwidth."""
    link = cluster_in(saved(tmp_path)).link("dp", "all_gather")
    assert link is not None
    assert link.latency_s == pytest.approx(1e-3, rel=1e-2)
    assert link.bytes_per_s == pytest.approx(1e9, rel=1e-2)


def test_the_command_adds_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For each axis and kind, from the messages and bytes that it prints."""
    with pytest.raises(SystemExit) as end:
        main(["predict", "dp2 zero3 fp32", "--cluster", str(saved(tmp_path)), "--json"])
    found = json.loads(capsys.readouterr().out)
    kind = "dp all_gather"
    expected = found["messages"][kind] * 1e-3 + found["bytes"][kind] / 1e9
    assert not end.value.code
    assert found["seconds"] == pytest.approx({kind: expected}, rel=1e-2)


@pytest.mark.parametrize("plan", ["dp2 zero3 fp32", "dp2 fp32", "tp2 fp32"])
def test_the_messages_are_the_ledgers_calls(plan: str) -> None:
    """As many as an engine's step sends, by axis and kind."""
    from shardwise.core.plan import Plan
    from shardwise.verify.options import Options
    from shardwise.verify.parity import build_options

    trainable, parsed = find("gpt"), Plan.parse(plan)
    options = build_options(trainable, parsed, Options())
    batch = trainable.batch(2, 0)

    def calls(world: object) -> dict[str, int]:
        engine = engine_of(trainable, parsed, world)  # pyright: ignore[reportArgumentType]
        for _ in range(4):
            engine.step(batch)
        found: dict[str, int] = {}
        for key, tally in engine.last.items():
            name = f"{key.axis} {key.kind}"
            found[name] = found.get(name, 0) + tally.calls
        return found

    predicted = predict_with(trainable.build("meta"), parsed, batch, options).messages
    assert run_threads(2, calls)[0] == predicted


@pytest.mark.parametrize(
    "text", [None, "x", "hosts = 1", "[links]", "[links.dp.send]\nlatency_s = -1"]
)
def test_a_file_without_links_is_refused(text: str | None, tmp_path: Path) -> None:
    """With the command that writes one."""
    file = tmp_path / "cluster.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match="shardwise doctor --mesh 'dp2 tp2' --save"):
        cluster_in(file)
