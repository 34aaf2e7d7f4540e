import pytest

from benchmarks import table
from benchmarks.roster import SUITES
from tests.benchmarks.test_bench import TASK, measured, replace
from tests.pool import run_gloo


def test_one_process_and_one_process_a_device_train_the_same_model() -> None:
    """All contenders end with one loss; one process sends nothing and has no peak of live bytes."""
    task = replace(TASK, contenders=SUITES["dataparallel"])
    rows = {row.contender: row for row in table.lines(task, run_gloo(2, measured, task))}
    assert len(rows) == 5
    for row in rows.values():
        assert row.loss == pytest.approx(rows["sw.DDP"].loss, rel=1e-5), row.note
        assert row.ratio is not None
    assert rows["sw.DDP"].wire_ratio == pytest.approx(1.0, rel=0.2)
    assert rows["sw.DataParallel"].wire_ratio is None
    assert rows["sw.DataParallel"].peak_bytes is None
    assert "moved after" not in rows["sw.DataParallel"].note
