"""The suite `offload`: states in host memory, beside FSDP2's policy."""

import pytest

from shardwise.bench import table
from shardwise.bench.roster import SUITES
from tests.bench.test_bench import TASK, measured, replace
from tests.pool import run_gloo


def test_offload_trains_the_same_model() -> None:
    """All contenders end with one loss."""
    task = replace(TASK, contenders=SUITES["offload"])
    rows = {row.contender: row for row in table.lines(task, run_gloo(2, measured, task))}
    assert tuple(rows) == SUITES["offload"]
    for row in rows.values():
        assert row.loss == pytest.approx(rows["zero2"].loss, rel=1e-5), row.note
        assert row.ratio is not None
