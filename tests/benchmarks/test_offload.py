"""The suite `offload`: states in host memory, beside FSDP2's policy."""

import pytest

from benchmarks import table
from benchmarks.contenders.roster import SUITES, choose, reference
from benchmarks.suite import heats
from tests.benchmarks.test_bench import TASK, measured, replace
from tests.pool import run_gloo


@pytest.mark.full
def test_offload_trains_the_same_model() -> None:
    """All contenders end with one loss, but for the one whose updates are a step late."""
    task = replace(TASK, contenders=SUITES["offload"])
    rows = {row.contender: row for row in table.lines(task, run_gloo(2, measured, task))}
    assert tuple(rows) == SUITES["offload"]
    for row in rows.values():
        if row.contender.startswith("DeepSpeed") and row.loss is None:
            assert row.note  # it is not installed, or its operators cannot be built
            continue
        near = 1e-2 if "delayed" in row.contender else 1e-5
        assert row.loss == pytest.approx(rows["zero2"].loss, rel=near), row.note
        assert row.ratio is not None
    on_disk = {name for name, row in rows.items() if row.disk_bytes}
    assert on_disk == {"zero2 offload:optim@disk", "zero3 offload:param@disk"}
    for name, row in rows.items():
        if "offload:" in name:
            assert row.host_bytes and row.moved_bytes, name


@pytest.mark.parametrize("suite", SUITES)
def test_a_reference_runs_beside_those_compared_to_it(suite: str):
    """Of a whole suite, and of each contender alone."""
    for words in ([], *([name] for name in SUITES[suite])):
        for names in heats(suite, choose(suite, words)):
            assert {reference(suite, name) for name in names} <= set(names)
