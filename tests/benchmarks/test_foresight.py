"""The suite that compares predicted and measured times: its plans, and what its rows say."""

from benchmarks import foresight
from benchmarks.foresight import Foresight, ForesightLine
from shardwise.prediction.cluster_presets import PRESETS


def test_the_plans_are_those_of_the_table_for_two_ranks() -> None:
    """Of each technique that runs on two ranks, in fp32; the model has no experts."""
    found = [str(plan) for plan in foresight.plans()]
    assert {"dp2 fp32", "dp2 zero3 fp32", "tp2 sp fp32", "cp2 fp32", "pp2 1f1b:4 fp32"} <= {*found}
    assert not any("ep" in text.split()[0] or "bf16" in text for text in found)


def test_errors_and_order_are_those_of_the_rows() -> None:
    """Half of the errors are below the median; plans that are nearly equal have no order."""
    rows = [("a", 1.0, 1.0), ("b", 1.1, 1.05), ("c", 1.5, 2.0), ("d", 1.4, 4.0)]
    lines = [ForesightLine(*row) for row in rows]
    found = Foresight("tiny", PRESETS["h100-sxm"], lines)
    assert [f"{line.error:+.3f}" for line in lines] == ["+0.000", "+0.048", "-0.250", "-0.650"]
    assert abs(found.median_error - 0.1488) < 1e-3
    assert found.ordered == 4 / 5  # c and d are not; a and b differ by 5 %
    assert "median error 14.9% over 4 plans" in foresight.as_text(found)
