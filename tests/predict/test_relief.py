"""What `shardwise predict` answers: does it fit, which word relieves it, how long links take."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.configured import configured
from shardwise.cli.main import main
from shardwise.cli.predict import predict_request
from shardwise.core.errors import InputError
from shardwise.core.plan import Plan
from shardwise.core.plan_check import problems
from shardwise.doctor.diagnosis import Diagnosis, RankDiagnosis
from shardwise.doctor.machine import look
from shardwise.doctor.timing import Timing
from shardwise.engine.prediction import predict_with
from shardwise.models.registry import find
from shardwise.prediction.link_time import Cluster, Link
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.relief import added_words, peak_parts, relieved
from shardwise.train.cluster import cluster_in
from shardwise.verify.parity import engine_of
from tests.pool import run_threads

PLANS = ["dp1", "dp2", "dp2 zero1", "dp2 zero3", "dp2 tp2 zero3 recompute:full", "pp2 1f1b:4"]


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["predict", *argv])
    assert left.value.code == 0
    return capsys.readouterr().out


def found(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    return json.loads(said(capsys, *argv, "--json"))


def prediction(text: str, rows: int | None, rank: int = 0) -> Prediction:
    return predict_request(configured(None, text, "gpt"), rows, None, rank).prediction(rank)


@pytest.mark.parametrize("text", PLANS)
def test_the_word_that_is_proposed_makes_the_part_smaller(text: str) -> None:
    """Each part of the peak, by the prediction of the plan with the word, for the same rows."""
    rows = Plan.parse(text).microbatches
    before = prediction(text, rows)
    parts = peak_parts(before)
    assert sum(parts.values()) == before.device_peak
    for part, stored_bytes in parts.items():
        plan = relieved(before.plan, part)
        if plan is None:
            assert part == "buffers"
        if plan is None or not stored_bytes:
            continue
        assert not problems(plan) and added_words(before.plan, plan)
        after = peak_parts(prediction(str(plan), rows))
        assert after[part] < stored_bytes, (part, str(plan))


def test_all_ranks_have_what_each_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Stages of a pipeline store different amounts; the sum over ranks counts each."""
    each = [peak_parts(prediction("pp2 1f1b:4", None, rank)) for rank in range(2)]
    assert each[0] != each[1]
    total = {name: each[0][name] + each[1][name] for name in each[0]}
    assert found(capsys, "pp2 1f1b:4", "--rank", "1")["in_all"] == total


def test_the_answer_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens of a step, the share of the device, the largest part and a plan that relieves it."""
    argv = "dp4", "--batch", "3", "--sequence", "10", "--device-memory"
    text = said(capsys, *argv, "8MiB")
    told = found(capsys, *argv, "8MiB")
    assert told["rows_a_step"] == 12 and told["tokens_a_step"] == 120
    assert "A step trains on 12 rows with 120 tokens" in text
    assert f"does not fit: the peak is {told['device_peak'] / 2**23:.0%} of 8.0 MiB" in text
    assert told["largest_part"] == "optimizer" and told["relieved_by"] == "dp4 zero1 fp64"
    assert 'zero1 makes it smaller: the plan "dp4 zero1 fp64".' in text
    assert (told["fits"], found(capsys, *argv, "80GiB")["fits"]) == (False, True)
    assert found(capsys, "dp4 device_memory:8MiB")["device_memory"] == 2**23


@pytest.mark.full
def test_where_the_memory_of_a_large_model_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 70B on 64 GPUs of 80 GiB: not without recomputation, whose activations are too many."""
    argv = "--model", "llama:70b", "--batch", "1", "--device-memory", "80GiB"
    told = found(capsys, "dp64 zero3 bf16", *argv)
    assert told["in_all"]["parameters"] == pytest.approx(2 * 70_553_706_496, rel=1e-3)
    assert (told["fits"], told["largest_part"]) == (False, "activations")
    assert told["relieved_by"] == "dp64 zero3 bf16 recompute:full"
    assert found(capsys, told["relieved_by"], *argv)["fits"]


SIZES = [2**power for power in range(12, 24, 2)]


def saved(folder: Path) -> Path:
    """The file of a cluster whose all-gathers take 1 ms and 1 ns a byte."""
    timings = [Timing("dp", "all_gather", n, 1e-3 + n / 1e9) for n in SIZES]
    file = folder / "cluster.toml"
    file.write_text(Diagnosis("dp2", [RankDiagnosis(look(), {}, timings, {})]).toml())
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
