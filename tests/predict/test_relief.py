"""What `shardwise predict` answers: does it fit, and which word relieves it."""

import json
from typing import Any

import pytest

from shardwise.cli.configured import configured
from shardwise.cli.main import main
from shardwise.cli.predict_command import predict_request
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems
from shardwise.engine.predict import predict_with
from shardwise.models.registry import find
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.relief import added_words, peak_parts, relieved
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


@pytest.mark.parametrize("plan", ["dp2 zero3 fp32", "dp2 fp32", "tp2 fp32"])
def test_the_messages_are_the_ledgers_calls(plan: str) -> None:
    """As many as an engine's step sends, by axis and kind."""
    from shardwise.core.plan.plan import Plan
    from shardwise.verify.parity import build_options
    from shardwise.verify.proof_options import Options

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
