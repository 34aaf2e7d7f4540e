"""Which tests run when: those marked `core` under `make test`, the rest under `make nightly`.

A test is core unless it is marked `full`: long, or of a fact that another test shows on fewer
processes.  Of one with more than `CASES` parameter sets, core are those marked so by hand; else the
first, then those that show the most new values.  The marker `cases(n)` sets their number; else it
is one where a case takes long (tests/durations.py).  Of a test marked `crossed`, `make nightly`
runs each value of each parameter once; `pytest -m ""` runs the other combinations.

Of the tests that are not core CI runs one part of several, by `--part`; `make nightly` runs all.
"""

import gc
import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from tests.forks import fork_ranks

#: Ranks are threads or processes, more than there are processors: each has one thread of torch's.
os.environ["OMP_NUM_THREADS"] = "1"
#: Property tests draw the same examples in every run, and are never judged by the clock.
settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")

CASES, LONG_S = 2, 0.8
#: Files of which every case that is not `full` runs: it costs next to nothing, or is a fact.
WHOLE = ("tests/test_plans.py", "tests/refused/", "tests/core/")
#: It is a part of `make check`.
HOUSE = "tests/test_house.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the table of plans runs (tests/test_plans.py)."""
    text = "cuda: the plans of the table run on the GPUs of this machine, or share the first one"
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help=text)
    text = "K/N: of the tests that are not core, part K of N alone; K counts on beyond N"
    parser.addoption("--part", default="0/1", help=text)


def pytest_report_header(config: pytest.Config) -> str:
    """Say which tests that are not core run."""
    k, n = _part(config)
    return f"of the tests that are not core, if they are chosen: part {k} of {n}, counted from 0"


def _part(config: pytest.Config) -> tuple[int, int]:
    k, n = map(int, str(config.getoption("--part")).split("/"))
    return k % n, n


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


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is core, and the combinations that no run needs; drop other parts."""
    tests: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        crossed = _is(cases[0], "crossed")
        first = [case for case, news in _by_news(cases) if news] if crossed else cases
        chosen = core(name, [case for case in cases if not _is(case, "full")])
        for case in cases:
            if case in chosen:
                case.add_marker("core")
                case.user_properties.append(("core", True))  # for tests/durations.py
            elif case not in first:
                case.add_marker("combination")
    left = _other_parts(items, *_part(config))
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def _other_parts(items: Sequence[pytest.Item], k: int, n: int) -> set[pytest.Item]:
    """What is not core and not of part k. The tests of a case of a file, as those of one plan, are
    of one part, for they share a run.
    """
    parts = dict[str, int]()
    other = set[pytest.Item]()
    for item in (item for item in items if not _is(item, "core")):
        name, _, case = item.nodeid.partition("[")
        shared = f"{item.path}[{case}" if case else name
        if parts.setdefault(shared, len(parts)) % n != k:
            other.add(item)
    return other


def _is(case: pytest.Item, mark: str) -> bool:
    return case.get_closest_marker(mark) is not None


def core(name: str, cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    """The cases of one test that `make test` runs."""
    if name.startswith(HOUSE):
        return []
    marked = [case for case in cases if _is(case, "core")]
    usual = 1 if name in _long() else CASES
    most = next((m.args[0] for case in cases for m in case.iter_markers("cases")), usual)
    if marked or len(cases) <= most or name.startswith(WHOLE):
        return marked or cases
    return [case for case, _ in itertools.islice(_by_news(cases), most)]


@cache
def _long() -> set[str]:
    """The tests of which each case takes long, as tests/durations.txt has them."""
    text = Path(__file__).with_name("durations.txt").read_text()
    rows = [line.split() for line in text.splitlines()]
    of = lambda name: "/".join(name.split(".")[:-1]) + ".py::" + name.split(".")[-1]  # noqa: E731
    each = {of(row[4]): sum(map(float, row[:2])) / sum(map(int, row[2:4])) for row in rows[1:]}
    return {name for name, seconds in each.items() if seconds >= LONG_S}


def _by_news(cases: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, int]]:
    """Each case, and how many parameter values it shows first; the most first, else as written."""
    left, seen = list(cases), set[tuple[str, str]]()
    while left:
        best = max(left, key=lambda case: len(_values(case) - seen))  # the first of the best
        left.remove(best)
        yield best, len(_values(best) - seen)
        seen |= _values(best)


def _values(case: pytest.Item) -> set[tuple[str, str]]:
    assert isinstance(case, pytest.Function)
    return {(name, repr(value)) for name, value in case.callspec.params.items()}
