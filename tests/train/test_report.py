"""The report: the numbers and the pictures of a run."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.models.gpt import GPT, SIZES, loss, random_text
from shardwise.prediction.time.step_time import StepTime
from shardwise.train import config
from shardwise.train.config import TrainSection
from shardwise.train.data.packed import Packed
from shardwise.train.data.tokens import ByteVocabulary
from shardwise.train.measure.baseline import Baseline, ddp_baseline
from shardwise.train.measure.time_cost import time_cost
from shardwise.train.model import optimizer_of
from shardwise.train.report import markdown, plots
from shardwise.train.report.files import write
from shardwise.train.report.report_contents import contents_of, smooth
from shardwise.train.report.section import Bars
from shardwise.train.report.summary import RankCost, Summary
from tests.pool import run_threads
from tests.train import runs
from tests.train.test_metrics import ONE

PACKED = Packed("key", np.zeros(2000, np.uint16), 1000, 3, ByteVocabulary())


def summary(folder: Path, *costs: RankCost) -> Summary:
    (folder / "plots").mkdir(exist_ok=True)
    records = [replace(ONE, step=n, loss=4 - n / 10) for n in range(1, 9)]
    records[-1] = replace(records[-1], validation=1.5)
    return Summary(
        config=config.build({"run": {"folder": str(folder)}}), plan="dp2 zero3", ranks=len(costs),
        parameters=1234, packed=PACKED, records=records, unigram=3.0, costs=costs,
        sample="def f():\n    pass\n",
    )  # fmt: skip


def written(given: Summary) -> str:
    """The text of report.md, in the run's folder."""
    assert write(contents_of(given), given.config.folder) == []
    return (given.config.folder / "report.md").read_text()


def text_of(given: Summary) -> str:
    return markdown.text(contents_of(given))


def test_the_report_holds_the_numbers_and_the_pictures(tmp_path: Path) -> None:
    """Loss, baseline and its distance, measured beside predicted, the sample; three PNG files."""
    cost = RankCost(
        {"parameters": 4096}, {"parameters": 4096}, {"all_gather": 10}, {"all_gather": 12}
    )
    text = written(summary(tmp_path, cost, cost))
    for part in (
        "dp2 zero3 on 2 ranks",
        "1,234 parameters",
        "50% below the unigram baseline",
        "    def f():",
    ):
        assert part in text
    assert "| training loss | 3.2000 nats a token in the last step, 3.4953 smoothed |" in text
    assert "4.0 KiB (4,096 bytes, as predicted) by each rank" in text
    assert "10 B (10 bytes, predicted 12 B, 12 bytes) by each rank" in text
    assert "| all_gather | 10 | 12 |" in text
    for name in ("loss", "memory", "bytes"):
        picture = tmp_path / "plots" / f"{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"plots/{name}.png" in text


def test_the_rank_with_most_is_told(tmp_path: Path) -> None:
    """Of a pipeline the ranks hold and send different things: the most, and whose that is."""
    costs = [RankCost({"x": n}, {"x": n}, {"send": m}, {"send": m}) for n, m in ((8, 9), (9, 8))]
    text = text_of(summary(tmp_path, *costs))
    assert (
        "| sent in a step | 9 B (9 bytes, as predicted) by rank 0, the most of any rank |" in text
    )
    assert "| held between steps | 9 B (9 bytes, as predicted) by rank 1, the most" in text
    assert "| rank 1, bytes | measured | predicted |" in text


def test_one_rank_sends_nothing(tmp_path: Path) -> None:
    """A sentence, and neither a table without rows nor a picture with an empty axis."""
    given = summary(tmp_path, RankCost({"x": 8}, {"x": 8}, {}, {}))
    text = written(given)
    assert "| sent in a step | nothing: there is one rank |" in text
    assert "No bytes: there is no other rank." in text.partition("## Bytes")[2]
    assert "bytes | measured" not in text.partition("## Bytes")[2]


def test_speed_is_that_of_the_steps_made_since_the_run_was_resumed(tmp_path: Path) -> None:
    """The steps of another plan do not count."""
    given = summary(tmp_path, RankCost({}, {}, {}, {}))
    slow = [replace(r, tokens_per_s=1.0, mfu=0.9) for r in given.records[:6]]
    fast = [replace(r, mfu=0.5) for r in given.records[6:]]
    text = text_of(replace(given, records=[*slow, *fast], began=6))
    assert "| speed | 128 tokens/s (median) |" in text
    assert "| MFU | 50.0% of the device's peak |" in text


def test_bars_are_labelled_in_units_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight bytes are '8 B' beside megabytes, and the axis has the unit of the largest."""
    labels: list[str] = []
    drawn = Axes.bar_label
    monkeypatch.setattr(
        Axes, "bar_label", lambda *a, **k: labels.extend(k["labels"]) or drawn(*a, **k)
    )
    series = {"measured": {"steps": 8}, "predicted": {"steps": 3 * 2**20}}
    plots.bars(tmp_path / "a.png", Bars("title", series))
    assert labels == [" 8 B", " 3.0 MiB"]


def test_nats_a_token_become_bits_a_byte(tmp_path: Path) -> None:
    """With two tokens a byte, ln 2 nats a token are two bits a byte."""
    given = summary(tmp_path, RankCost({}, {}, {}, {}))
    assert given.bits(math.log(2)) == pytest.approx(2.0)


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant() -> None:
    """The moving mean is not pulled to zero at its start."""
    assert smooth([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert smooth([5.0, 1.0])[0] == pytest.approx(5.0)
    assert 1.0 < smooth([5.0, 1.0])[1] < 5.0


def test_ddp_on_the_same_ranks_stands_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third bar and column with what plain data parallelism would hold and send; and the sums."""
    labels: list[str] = []
    drawn = Axes.bar_label
    monkeypatch.setattr(
        Axes, "bar_label", lambda *a, **k: labels.extend(k["labels"]) or drawn(*a, **k)
    )
    cost = RankCost({"x": 4, "y": 5}, {"x": 4, "y": 5}, {"dp gather": 1}, {"dp gather": 1})
    ddp = Baseline({"x": 8, "y": 10}, {"dp all_reduce": 7})
    text = written(replace(summary(tmp_path, cost, cost), baseline=ddp))
    assert "| rank 0, bytes | measured | predicted | ddp on the same ranks |" in text
    assert "| x | 4 | 4 | 8 |" in text
    assert "| total | 9 | 9 | 18 |" in text
    assert "| dp all_reduce | - | - | 7 |" in text
    assert labels[:9] == [" 4 B", " 5 B", " 9 B"] * 2 + [" 8 B", " 10 B", " 18 B"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_baseline_is_what_ddp_holds_and_sends(precision: str) -> None:
    """The numbers of a `dp2 ddp` engine after a step, which has a few bytes of padding besides."""
    baseline = ddp_baseline(SIZES["tiny"], Plan.parse(f"dp2 zero3 {precision}"))
    assert baseline is not None
    for memory, sent in run_threads(2, one_step, f"dp2 {precision}"):
        assert memory == {k: pytest.approx(v, rel=1e-3) for k, v in baseline.memory.items()}
        assert sent == {k: pytest.approx(v, rel=1e-3) for k, v in baseline.sent.items()}


def one_step(world: World, plan: str) -> tuple[dict[str, int], dict[str, int]]:
    """What a step's engine holds and has sent, the second step of the run."""
    model = GPT(SIZES["tiny"])
    engine = sw.parallelize(model, plan, world, optimizer=sw.AdamW(lr=1e-3), loss=loss, clip=1.0)
    for _ in range(2):
        engine.step(random_text(2, 8, 250, 0))
    return engine.memory(), engine.measured_bytes()


@pytest.mark.parametrize("plan", ["dp4", "dp1", "", "dp2 bf16"])
def test_ddp_itself_has_no_baseline(plan: str) -> None:
    """Nor has a run on one rank."""
    assert ddp_baseline(SIZES["tiny"], Plan.parse(plan)) is None


@pytest.mark.parametrize(("name", "states"), [("adamw", 2), ("lion", 1)])
def test_the_baseline_has_the_optimizer_of_the_run(name: str, states: int) -> None:
    """Under ddp each rank keeps the states of the optimizer that [train] names."""
    kind = optimizer_of(TrainSection.model_validate({"optimizer": name}))
    baseline = ddp_baseline(SIZES["tiny"], Plan.parse("dp2 zero3 fp32"), kind)
    assert baseline is not None
    assert baseline.memory["optimizer"] // baseline.memory["parameters"] == states


def test_the_time_of_a_step_stands_beside_its_prediction(tmp_path: Path) -> None:
    """Its parts, the median after the warm-up, and the ratio; in the page and as JSON."""
    given = summary(tmp_path, RankCost({}, {}, {}, {}))
    predicted = StepTime(0.3, {"dp": 0.1}, 0.0, 0.05, 64, 1e9, 1e12)
    text = written(replace(given, time=time_cost("h200", predicted, given.records)))
    said = "500.00 ms (median of 5 steps), predicted 450.00 ms for h200: 0.90 of measured"
    assert f"| time of a step | {said} |" in text
    assert "- time of a step: -10.0% predicted over measured" in text
    assert "| exposed dp | 100.00 |" in text and "| measured | 500.00 |" in text
    assert "exposed dp" in (tmp_path / "report.html").read_text()
    told = json.loads((tmp_path / "step_time.json").read_text())
    assert (told["measured_s"], told["predicted"]["compute_s"]) == (0.5, 0.3)
    assert time_cost("h200", predicted, given.records[:3]) is None


def test_a_run_with_a_cluster_is_timed(tmp_path: Path) -> None:
    """After the last step; a cluster that cannot be is refused before the first."""
    given = runs.settings(tmp_path / "run")
    timed = given.run.model_copy(update={"cluster": "h100-sxm"})
    runs.run(given.model_copy(update={"run": timed}))
    told = json.loads((given.folder / "step_time.json").read_text())
    assert told["steps"] == 4 and 0 < told["predicted"]["step_s"] < told["measured_s"]
    wrong = given.run.model_copy(update={"cluster": "h100", "folder": str(tmp_path / "other")})
    with pytest.raises(InputError, match=r"the cluster 'h100'.*Write instead: h200"):
        runs.run(given.model_copy(update={"run": wrong}))
