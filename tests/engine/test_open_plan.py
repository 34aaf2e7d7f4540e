"""A plan that names no data axis, on the worlds that its other axes divide."""

import pytest

import shardwise as sw
from shardwise.core.errors import RankError
from tests.engine.cases import regression, small_gpt
from tests.pool import run_threads


def ranks_of_data(world, plan: str) -> tuple[str, int, int]:
    """The plan that the engine runs, and which of how many data ranks this is."""
    engine = sw.parallelize(small_gpt(), plan, world, optimizer=sw.SGD(lr=0.1), loss=regression)
    return str(engine.plan), engine.data_rank, engine.data_ranks


@pytest.mark.parametrize(
    ("plan", "completed", "data"),
    [
        ("zero3", "dp4 zero3", [0, 1, 2, 3]),
        ("tp2 zero1", "dp2 tp2 zero1", [0, 0, 1, 1]),
        ("pp2 1f1b:4", "pp2 dp2 1f1b:4", [0, 1, 0, 1]),
    ],
)
def test_an_open_plan_is_completed_for_its_world_and_printed_once(
    plan: str, completed: str, data: list[int], capsys: pytest.CaptureFixture[str]
):
    """The ranks that other axes leave over are data ranks; rank 0 prints the completed plan."""
    found = run_threads(4, ranks_of_data, plan)
    assert found == [(completed, rank, max(data) + 1) for rank in data]
    assert capsys.readouterr().err.count(f"'{plan}' on 4 ranks is '{completed}'") == 1


def test_a_plan_that_names_its_data_ranks_is_not_completed(capsys: pytest.CaptureFixture[str]):
    """`dp1` insists on one data rank; a complete plan prints nothing."""
    with pytest.raises(RankError, match=r"'dp1 zero3', which needs 1 process .dp1., where 2 run"):
        run_threads(2, ranks_of_data, "dp1 zero3")
    assert run_threads(2, ranks_of_data, "dp2 zero3")[0][0] == "dp2 zero3"
    assert capsys.readouterr().err == ""
