"""Matrices of tests: `make test` runs a fixed sample of each, `make test-all` the rest as well.

A test with more than `CASES` parameter sets is a matrix; the marker `cases(n)` sets another limit.
Its sample is the same in every run: the cases are shuffled with a seed made from the test's name,
and those that show a parameter value not seen yet come first. Tests marked `full` belong to the
rest: long ones, of facts that another test shows on fewer processes. `pytest --matrix=full` runs
everything, `--matrix=rest` what the sample leaves out. Of a long test marked `crossed`, whose cases
are all combinations of several parameters, the rest has each value of each parameter, once.
"""

import gc
import itertools
import os
import random
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import pytest

from tests.forks import fork_ranks

#: Ranks are threads or processes, more than there are processors: each has one thread of torch's.
os.environ["OMP_NUM_THREADS"] = "1"

CASES = 2
#: Files of which every case that is not `full` runs: it costs next to nothing, or is a fact.
WHOLE = ("tests/test_house.py", "tests/test_plans.py", "tests/core/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix",
        choices=("sample", "rest", "full"),
        default="sample",
        help="which cases of large parametrized tests run",
    )


@pytest.fixture(scope="session", autouse=True)
def _forked() -> Iterator[pytest.MonkeyPatch]:
    """The launcher starts ranks in a tenth of a second (see tests/forks.py)."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:  # else no test that was collected has ranks
            fork_ranks(patch)
        yield patch


@pytest.fixture
def interpreters(_forked: pytest.MonkeyPatch) -> Iterator[None]:
    """Each rank has an interpreter of its own, as everywhere but in tests."""
    _forked.undo()
    yield
    fork_ranks(_forked)


def pytest_collection_finish() -> None:
    """Proofs and leak tests collect garbage: modules and test items need not be looked through."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the sample of every matrix, or what the sample leaves out."""
    which = config.getoption("--matrix")
    if which == "full":
        return
    short = _by_test(item for item in items if item.get_closest_marker("full") is None)
    chosen = {item.nodeid for name, cases in short.items() for item in sample(name, cases)}
    if which == "rest":
        every = _by_test(items).items()
        chosen = {item.nodeid for name, cases in every for item in rest(name, cases)} - chosen
    left_out = [item for item in items if item.nodeid not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in chosen]


def _by_test(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    tests: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    return tests


def sample(name: str, cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    """A few of the cases of one test, which show as many different parameter values as can be."""
    marker = cases[0].get_closest_marker("cases")
    size = CASES if marker is None else marker.args[0]
    if len(cases) <= size or name.startswith(WHOLE):
        return cases
    return [case for case, _ in itertools.islice(_by_news(name, cases), size)]


def rest(name: str, cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    """All cases of one test; of a crossed matrix, those with a value not seen yet."""
    if cases[0].get_closest_marker("crossed") is None:
        return cases
    return [case for case, news in _by_news(name, cases) if news]


def _by_news(name: str, cases: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, int]]:
    """Each case, and how many parameter values it shows first; the most first."""
    left = list(cases)
    random.Random(zlib.crc32(name.encode())).shuffle(left)
    seen: set[tuple[str, str]] = set()
    while left:
        best = max(left, key=lambda case: len(_values(case) - seen))  # the first of the best
        left.remove(best)
        yield best, len(_values(best) - seen)
        seen |= _values(best)


def _values(case: pytest.Item) -> set[tuple[str, str]]:
    assert isinstance(case, pytest.Function)
    return {(name, repr(value)) for name, value in case.callspec.params.items()}
