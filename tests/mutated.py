"""For the judge of the suite (tests/mutants.py): a mutation in this process, or what tests call.

Imported by the processes of a test run, their ranks among them, where the environment variable
`VARIABLE` names a mutation or `RECORD` a folder.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from mmap import mmap
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from tests.verify.test_mutations import CATALOGUE, NAMED

VARIABLE, RECORD = "SHARDWISE_TESTS_MUTATION", "SHARDWISE_TESTS_RECORD"


def apply(name: str) -> pytest.MonkeyPatch:
    """Put the mutation into this process."""
    patch = pytest.MonkeyPatch()
    NAMED[name].apply(patch)
    return patch


class Recorder:
    """Notes for each test which mutations are of a function that it calls, in any process.

    A byte of the file stands for each mutation. The processes of a test run share it.
    """

    def __init__(self, folder: Path) -> None:
        own = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.calls = folder / f"{own}.calls"
        with (folder / f"{own}.flags").open("a+b") as file:
            file.truncate(len(CATALOGUE))
            self.flags = mmap(file.fileno(), len(CATALOGUE))
        self.unknown = self._watch()

    def _watch(self) -> set[int]:
        """Replace what mutations replace; those whose functions cannot be watched."""
        found: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        owners: dict[tuple[int, str], Any] = {}
        unknown = set[int]()
        for number, mutation in enumerate(CATALOGUE):
            patch = pytest.MonkeyPatch()
            mutation.apply(patch)
            replaced = [(owner, name) for owner, name, _ in patch._setattr]
            watched = not patch._setitem
            patch.undo()
            for owner, name in replaced:
                watched &= isinstance(vars(owner).get(name), FunctionType)
                owners[id(owner), name] = owner
                found[id(owner), name].append(number)
            unknown |= set() if watched else {number}
        for (key, name), numbers in found.items():
            owner = owners[key, name]
            if isinstance(real := vars(owner).get(name), FunctionType):
                setattr(owner, name, self._noting(real, numbers))
        return unknown

    def _noting(self, real: Callable[..., Any], numbers: list[int]) -> Callable[..., Any]:
        @wraps(real)
        def noting(*args: Any, **kwargs: Any) -> Any:
            for number in numbers:
                self.flags[number] = 1
            return real(*args, **kwargs)

        return noting

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Write what the test has called, and how long it took."""
        self.flags[:] = bytes(len(CATALOGUE))
        began = time.monotonic()
        result = yield
        called = {n for n, flag in enumerate(self.flags[:]) if flag} | self.unknown
        line = json.dumps([item.nodeid, time.monotonic() - began, sorted(called)])
        with self.calls.open("a") as file:
            print(line, file=file)
        return result


if VARIABLE in os.environ:
    apply(os.environ[VARIABLE])
RECORDER = Recorder(Path(os.environ[RECORD])) if RECORD in os.environ else None


def register(plugins: pytest.PytestPluginManager) -> None:
    """Let the recorder, if there is one, see each test."""
    if RECORDER is not None:
        plugins.register(RECORDER)
