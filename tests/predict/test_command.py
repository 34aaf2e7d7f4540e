"""What `shardwise predict` answers: memory, bytes, time, whether it fits, and what relieves it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.configured import configured
from shardwise.cli.predict_command import predict_request
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems
from shardwise.engine.predict import predict_with
from shardwise.models.registry import find
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.relief import added_words, relieved
from shardwise.verify.inputs import Options
from shardwise.verify.parity import build_options
from tests.train.runs import ended


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    found, *said = ended(capsys, "predict", *argv)
    assert found == code
    return said[0], said[1]


def found(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
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


def test_all_ranks_have_what_each_has(capsys: pytest.CaptureFixture[str]):
    """Stages of a pipeline store different amounts; the sum over ranks counts each."""
    each = [prediction("pp2 2bw:4", None, rank).dry_step.parts for rank in range(2)]
    assert each[0] != each[1]
    total = {name: each[0][name] + each[1][name] for name in each[0]}
    assert found(capsys, "pp2 2bw:4", "--rank", "1")["in_all"] == total


def test_the_answer_in_words(capsys: pytest.CaptureFixture[str]):
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
def test_where_the_memory_of_a_large_model_is(capsys: pytest.CaptureFixture[str]):
    """Llama 70B on 64 GPUs of 80 GiB: not without recomputation, whose activations are too many."""
    argv = "--model", "llama:70b", "--batch", "1", "--device-memory", "80GiB"
    told = found(capsys, "dp64 zero3 bf16", *argv)
    assert told["in_all"]["parameters"] == pytest.approx(2 * 70_553_706_496, rel=1e-3)
    assert (told["fits"], told["largest_part"]) == (False, "activations")
    assert told["relieved_by"] == "dp64 zero3 bf16 recompute:full"
    assert found(capsys, told["relieved_by"], *argv)["fits"]


@pytest.mark.full
def test_the_command_has_one_object(capsys: pytest.CaptureFixture[str]):
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


def test_a_model_on_meta_is_predicted_and_not_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
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
def test_the_function_returns_what_the_command_prints(
    words: str, capsys: pytest.CaptureFixture[str]
):
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


def test_the_command_prints_the_time_and_its_parts(capsys: pytest.CaptureFixture[str]):
    """As a sentence, and with --json as numbers whose parts sum to the step."""
    argv = "dp16 zero3 bf16", "--model", "gpt:tiny", "--cluster", "h200"
    text, step = said(capsys, *argv)[0], found(capsys, *argv)["step_time"]
    parts = [step["compute_s"], *step["exposed_s"].values(), step["bubble_s"], step["update_s"]]
    assert step["step_s"] == pytest.approx(sum(parts))
    assert f"A step takes {step['step_s']:.3g} s: compute" in text
    assert f"MFU {step['mfu']:.1%}." in text
