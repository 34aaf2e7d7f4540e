"""What `shardwise predict` answers: memory, bytes, time, whether it fits, and what relieves it; and
what `schedule` and `verify` print.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli.configured import configured
from shardwise.cli.predict_command import predict_request
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems
from shardwise.engine.predict import predict_with
from shardwise.models.registry import find
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.relief import added_words, relieved
from shardwise.train import config
from shardwise.train.progress import size_text
from shardwise.verify.inputs import Options
from shardwise.verify.parity import build_options
from tests.train.runs import Capture, ended, printed, run, settings
from tests.verify import small


def said(capsys: Capture, *argv: str, code: int = 0) -> tuple[str, str]:
    found, *said = ended(capsys, "predict", *argv)
    assert found == code
    return said[0], said[1]


def found(capsys: Capture, *argv: str) -> dict[str, Any]:
    return json.loads(said(capsys, *argv, "--json")[0])


def prediction(text: str, rows: int | None, rank: int = 0) -> Prediction:
    return predict_request(configured(None, text, "gpt"), rows, None, rank).prediction(rank)


PLANS = ["dp2", "dp2 zero3", "dp1", "dp2 zero1", "dp2 tp2 zero3 recompute:full", "pp2 1f1b:4"]


@pytest.mark.parametrize("text", PLANS)
def test_the_word_that_is_proposed_makes_the_part_smaller(text: str):
    """Each part of the peak, by the prediction of the plan with the word, for the same rows."""
    rows = 8 * Plan.parse(text).microbatches  # activations are the most, as in real steps
    before = prediction(text, rows)
    parts = before.dry_step.parts
    assert sum(parts.values()) == before.device_peak
    for part, stored_bytes in parts.items():
        plan = relieved(before.plan, part)
        if plan is None:
            assert part == "buffers"
        if plan is None or not stored_bytes:
            continue
        assert not problems(plan) and added_words(before.plan, plan)
        after = prediction(str(plan), rows).dry_step.parts
        assert after[part] < stored_bytes, (part, str(plan))


def test_all_ranks_have_what_each_has(capsys: Capture):
    """Stages of a pipeline store different amounts; the sum over ranks counts each."""
    each = [prediction("pp2 2bw:4", None, rank).dry_step.parts for rank in range(2)]
    assert each[0] != each[1]
    total = {name: each[0][name] + each[1][name] for name in each[0]}
    assert found(capsys, "pp2 2bw:4", "--rank", "1")["in_all"] == total


def test_the_answer_in_words(capsys: Capture):
    """Tokens of a step, the share of the device, the largest part and a plan that relieves it."""
    argv = "dp4", "--batch", "3", "--sequence", "10", "--device-memory"
    text, told = said(capsys, *argv, "8MiB")[0], found(capsys, *argv, "8MiB")
    assert told["rows_a_step"] == 12 and told["tokens_a_step"] == 120
    assert "A step trains on 12 rows with 120 tokens" in text
    assert f"does not fit: the peak is {told['device_peak'] / 2**23:.0%} of 8.0 MiB" in text
    assert told["largest_part"] == "optimizer" and told["relieved_by"] == "dp4 zero1 fp64"
    assert 'zero1 makes it smaller: the plan "dp4 zero1 fp64".' in text
    assert (told["fits"], found(capsys, *argv, "80GiB")["fits"]) == (False, True)
    assert found(capsys, "dp4 device_memory:8MiB")["device_memory"] == 2**23


@pytest.mark.full
def test_the_command_has_one_object(capsys: Capture):
    """Its keys are what scripts read; the sequence and the batch change activations alone."""
    one = found(capsys, "dp64 zero3 bf16", "--rank", "63")
    assert list(one) == [
        *("plan", "model", "world", "rank", "memory", "bytes", "activations"),
        *("host_activations", "fetched", "device_peak", "recomputed", "recomputed_flops"),
        *("messages", "seconds", "step_time", "time_ms", "peak_parts", "in_all", "rows_a_step"),
        *("tokens_a_step", "device_memory", "fits", "largest_part", "relieved_by"),
    ]
    assert (one["plan"], one["world"], one["rank"]) == ("dp64 zero3 bf16", 64, 63)
    assert list(one["bytes"]) == ["dp all_gather", "dp all_reduce", "dp reduce_scatter"]
    other = found(capsys, "dp64 zero3 bf16", "--sequence", "128", "--batch", "4")
    assert other["bytes"] == one["bytes"] and other["activations"] > one["activations"]


NET = """
import torch
from torch import nn

def build():
    with torch.device("{device}"):
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
"""


def test_a_model_on_meta_is_predicted_and_not_trained(tmp_path: Path, capsys: Capture):
    """`file.py:build` without weights: the numbers of the same model with weights; no proof."""
    both: list[dict[str, Any]] = []
    for device in ("cpu", "meta"):
        file = tmp_path / f"{device}.py"
        file.write_text(NET.format(device=device))
        both.append(found(capsys, "dp2 tp2 zero3", "--model", f"{file}:build"))
    for key in both[0].keys() - {"model", "time_ms"}:
        assert both[0][key] == both[1][key]
    with pytest.raises(InputError, match="on the meta device, which has no weights"):
        find(f"{tmp_path / 'meta.py'}:build").build()


@pytest.mark.parametrize("words", ["offload:auto device_memory:16MiB", "device_memory:16MiB"])
def test_the_function_returns_what_the_command_prints(words: str, capsys: Capture):
    """The offload that is chosen, the peak on the device, and a note if it is above the bound."""
    plan, model = f"dp2 zero3 fp32 {words}", find("gpt")
    out, err = said(capsys, plan, "--json")
    printed = json.loads(out)
    options = replace(build_options(model, Plan.parse(plan), Options()), clip=1.0)
    own = predict_with(model.plain(), plan, model.make_batch(2, 0), options)
    assert (str(own.plan), own.device_peak) == (printed["plan"], printed["device_peak"])
    assert [f"Note: {note}." for note in own.notes] == err.splitlines()
    chosen = own.plan.offload
    assert chosen not in (None, "auto") if "auto" in words else chosen is None
    above = any("more than device_memory allows" in note for note in own.notes)
    assert above == (own.device_peak > 2**24) == ("auto" not in words)


def test_the_command_prints_the_time_and_its_parts(capsys: Capture):
    """As a sentence, and with --json as numbers whose parts sum to the step."""
    argv = "dp16 zero3 bf16", "--model", "gpt:tiny", "--cluster", "h200"
    text, step = said(capsys, *argv)[0], found(capsys, *argv)["step_time"]
    parts = [step["compute_s"], *step["exposed_s"].values(), step["bubble_s"], step["update_s"]]
    assert step["step_s"] == pytest.approx(sum(parts))
    assert f"A step takes {step['step_s']:.3g} s: compute" in text
    assert f"MFU {step['mfu']:.1%}." in text


# --- moments, proofs and schedules ----------------------------------------------------------------


@pytest.mark.parametrize("plan", ["dp2 zero3", "pp2 offload:auto device_memory:9MiB"])
def test_what_is_predicted_for_a_configuration_is_what_its_run_holds_and_sends(
    plan: str, tmp_path: Path, capsys: Capture
) -> None:
    """By `predict --config` and by `train --dry-run`, which starts and writes nothing."""
    given = settings(tmp_path / "run", plan, optimizer="lion", batch=5, clip=0, steps=3)
    file = tmp_path / "run.toml"
    file.write_text(config.dump(given))
    before = sorted(tmp_path.rglob("*"))
    told = found(capsys, "--config", str(file))
    checked = printed(capsys, "train", str(file), "--dry-run")
    assert sorted(tmp_path.rglob("*")) == before
    assert told["model"] == "gpt:quickstart of run.toml"
    assert told["rows_a_step"] == 5  # of which one of two data ranks has three
    assert "A step trains on 5 rows" in checked
    assert checked.startswith(f"{told['plan']} on 2 ranks, ")
    record = run(given, 2)[-1]
    assert record.memory_bytes is not None
    for name, count in told["memory"].items():
        assert record.memory_bytes.get(name) == count
        assert name in checked and size_text(count) in checked
    assert record.sent_bytes == sum(told["bytes"].values())


@pytest.mark.full
def test_the_model_of_a_configuration_is_proved(tmp_path: Path, capsys: Capture) -> None:
    """Under a plan on the command line, which replaces its own."""
    file = tmp_path / "config.toml"
    file.write_text(config.dump(settings(tmp_path / "run", "dp2 zero3")))
    told = json.loads(printed(capsys, "verify", "dp2 zero1", "--config", str(file), "--json"))
    assert (told["plan"], told["holds"]) == ("dp2 zero1 fp64", True)
    assert told["model"] == "gpt:quickstart of config.toml"


def test_the_drawing_stands_above_the_numbers(capsys: Capture) -> None:
    """1F1B on two ranks: the figure, then clock and formula side by side."""
    text = printed(capsys, "schedule", "1f1b:2", "--stages", "2")
    said = [line.split() for line in text.splitlines()]
    assert said[2][2:] == ["F0", "F1", "..", "..", "B0", "--", "..", "B1", "--"]
    assert said[3][2:] == ["..", "F0", "B0", "--", "F1", "B1", "--", "..", ".."]
    numbers = {line[0]: line[1:] for line in said[5:] if line}
    assert numbers["makespan"] == ["9", "9"]
    assert numbers["bubble"] == ["33.33%", "33.33%", "(p-1)/(m+p-1)"]
    assert numbers["activations"] == ["2", "1", "2", "1", "min(p-r,", "m)"]
    assert numbers["transfers"] == ["4", "-", "2", "act,", "2", "grad"]


def scheduled(capture: Capture, line: str) -> dict[str, Any]:
    return json.loads(printed(capture, "schedule", *line.split(), "--json"))


def test_the_schedule_of_a_run_is_that_of_its_plan(tmp_path: Path, capsys: Capture) -> None:
    """1F1B unless the plan says another, on the ranks of the axis pp; without one it is refused."""
    file, wanted = tmp_path / "run.toml", scheduled(capsys, "1f1b:4 --stages 2")
    for plan in ("pp2 dp2", "pp2 1f1b:4"):
        file.write_text(f'[plan]\ntext = "{plan}"')
        assert scheduled(capsys, f"--config {file}") == wanted
    assert "beside a schedule's name" in ended(capsys, "schedule", "1f1b", "--config", str(file))[2]
    file.write_text('[plan]\ntext = "dp2"')
    assert "has no pipeline" in ended(capsys, "schedule", "--config", str(file))[2]


def test_costs_reach_the_clock_and_formulas_are_held_back(capsys: Capture) -> None:
    """With hops, stages that differ, or halves that do, only the clock speaks of time."""
    for line in ("1f1b --costs F=1,I=1,W=1,hop=0.1", "zb-h1 --costs F=2,I=1,W=1"):
        said = scheduled(capsys, line)
        assert (said["formula"]["makespan"], said["formula"]["bubble"]) == (None, None)
        assert said["activations"] == said["formula"]["activations"]
    said = scheduled(capsys, "naive --stages 2 --costs F=1/2,B=3/5,hop=0.5")
    assert (said["makespan"], said["idle"]) == (12, [8, 5])
    said = scheduled(capsys, "2bw:4 --stages=2 --batches=2")
    assert said["versions"] == [2, 2]
    assert said["makespan"] == said["formula"]["makespan"] == 3 * 9


def test_the_moments_of_a_step(tmp_path: Path, capsys: Capture) -> None:
    """A step ends with what is between steps; its peak and where it is; the picture is an SVG."""
    argv = ("dp2 zero3", "--timeline", str(tmp_path / "step.svg"))
    told = found(capsys, *argv, "--rank", "1")
    *_, end = told["predicted"]["events"]
    assert told["rank"] == 1 and "measured" not in told
    assert end["by_category"] == told["memory"] | {"gathered": 0, "kept": 0}
    totals = [sum(event["by_category"].values()) for event in told["predicted"]["events"]]
    assert told["predicted"]["peak"]["bytes"] == max(totals)
    assert "<svg" in (tmp_path / "step.svg").read_text()
    assert "bytes at the most" in said(capsys, *argv)[0]


@pytest.mark.full
def test_a_measurement_beside_the_prediction(capsys: Capture) -> None:
    """Local ranks measure each event; only temporary bytes are not in the prediction."""
    model = f"{small.__file__}:build"
    told = found(capsys, "dp2 zero3", "--measure", "--model", model)
    measured = told["measured"]["events"]
    peak = max(event["peak"] for event in measured)
    assert peak >= told["measured"]["peak"]["bytes"]
    for event in measured:
        del event["by_category"]["temporary"], event["peak"]
    predicted = [dict(event) for event in told["predicted"]["events"]]
    for event in predicted:
        event.pop("temporary_most", None)
    assert measured == predicted


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_allocator_of_a_gpu(capsys: Capture) -> None:
    """What PyTorch's allocator reserves holds what it has allocated."""
    line = ("dp1 recompute:full arenas", "--measure", "--device", "cuda")
    told = found(capsys, *line)["allocator"]
    assert told["reserved_bytes"] >= told["allocated_bytes"] > 0
