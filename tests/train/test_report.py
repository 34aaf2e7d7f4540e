"""The report: the numbers and the pictures of a run."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwise.train import config, plots, report
from shardwise.train.packed import Packed
from shardwise.train.tokens import ByteVocabulary
from tests.train.test_metrics import ONE

PACKED = Packed("key", np.zeros(2000, np.uint16), 1000, 3, ByteVocabulary())


def summary(folder: Path, cost: report.Cost) -> report.Summary:
    (folder / "plots").mkdir()
    records = [replace(ONE, step=n, loss=4 - n / 10) for n in range(1, 9)]
    records[-1] = replace(records[-1], validation=1.5)
    return report.Summary(
        config=config.build({"run": {"folder": str(folder)}}), plan="dp2 zero3", ranks=2,
        parameters=1234, packed=PACKED, records=records, unigram=3.0, peak_flops=1e9, cost=cost,
        sample="def f():\n    pass\n",
    )  # fmt: skip


def test_the_report_holds_the_numbers_and_the_pictures(tmp_path: Path) -> None:
    """Loss, baseline and its distance, measured beside predicted, the sample; three PNG files."""
    cost = report.Cost(
        {"parameters": 4096}, {"parameters": 4096}, {"all_gather": 10}, {"all_gather": 12}
    )
    path = report.write(summary(tmp_path, cost))
    text = path.read_text()
    for part in (
        "dp2 zero3 on 2 ranks",
        "1,234 parameters",
        "50% below the unigram baseline",
        "    def f():",
    ):
        assert part in text
    assert "4.0 KiB (4,096 bytes, as predicted)" in text
    assert "10 B (10 bytes, predicted 12 B, 12 bytes)" in text
    assert "| all_gather | 10 | 12 |" in text
    for name in ("loss", "memory", "bytes"):
        picture = tmp_path / "plots" / f"{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"plots/{name}.png" in text


def test_nats_a_token_become_bits_a_byte(tmp_path: Path) -> None:
    """With two tokens a byte, ln 2 nats a token are two bits a byte."""
    given = summary(tmp_path, report.Cost({}, {}, {}, {}))
    assert given.bits(math.log(2)) == pytest.approx(2.0)


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant() -> None:
    """The moving mean is not pulled to zero at its start."""
    assert plots.smoothed([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert plots.smoothed([5.0, 1.0])[0] == pytest.approx(5.0)
    assert 1.0 < plots.smoothed([5.0, 1.0])[1] < 5.0
