"""For the judge of the suite (tests/mutants.py): a fault in this process, or what tests call.

A plugin of pytest (`-p tests.mutated`), which the processes that ranks are forked from import too.
Where the environment variable `VARIABLE` names a fault, it is put into the package; where `RECORD`
names a folder, it is written there for each test which functions of the package it calls.
"""

import builtins
import importlib.machinery
import json
import os
import re
import time
from collections.abc import Generator
from inspect import unwrap
from mmap import mmap
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.mechanical import FLAGS, PACKAGE, RECORD, VARIABLE, watched, with_fault


class Loader:
    """Compiles files of the package from trees that are changed before they are imported."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.file = PACKAGE / fault.partition(":")[0]
        self.real = importlib.machinery.SourceFileLoader.get_code

    def start(self) -> None:
        """Load what this process imports from now on."""

        def get_code(loader: Any, module: str) -> CodeType | None:
            file = Path(loader.get_filename(module))
            if file != self.file if self.fault else PACKAGE not in file.parents:
                return self.real(loader, module)
            tree = with_fault(file, self.fault) if self.fault else watched(file)
            return compile(tree, str(file), "exec", dont_inherit=True)

        pytest.MonkeyPatch().setattr(importlib.machinery.SourceFileLoader, "get_code", get_code)


def put_in(name: str) -> None:
    """Put a fault into this process: one of the catalogue, or a drawn one."""
    if " | " in name:
        Loader(name).start()
        return
    from tests.verify.test_mutations import NAMED

    NAMED[name].apply(pytest.MonkeyPatch())


def replaced() -> dict[str, list[str] | None]:
    """The functions that each mutation of the catalogue replaces; None if that is not known."""
    from tests.verify.test_mutations import CATALOGUE

    found = dict[str, list[str] | None]()
    for mutation in CATALOGUE:
        patch = pytest.MonkeyPatch()
        mutation.apply(patch)
        functions = [_function(old) for _, _, old in patch._setattr]
        known = functions and not patch._setitem and all(functions)
        found[mutation.id] = functions if known else None
        patch.undo()
    return found


def _function(value: Any) -> str:
    """`engine/batch.py:filled`; nothing if it is no function of the package."""
    real = unwrap(getattr(value, "__func__", value))
    file = Path(real.__code__.co_filename) if isinstance(real, FunctionType) else Path()
    if PACKAGE not in file.parents:
        return ""
    return f"{file.relative_to(PACKAGE)}:{real.__qualname__.partition('.<locals>')[0]}"


class Recorder:
    """Writes for each test that passes which functions of the package it calls, in any process. A
    byte of a file stands for each function. The processes of a test run share it.
    """

    def __init__(self, folder: Path) -> None:
        own = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.calls = folder / f"{own}.calls"
        with (folder / f"{own}.flags").open("a+b") as file:
            file.truncate(FLAGS)
            self.flags = mmap(file.fileno(), FLAGS)
        builtins.__dict__["__called__"] = self.flags
        Loader().start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Write what the test has called, and how long it took."""
        self.flags[:] = bytes(FLAGS)
        failed, began = item.session.testsfailed, time.monotonic()
        result = yield
        called = [found.start() for found in re.finditer(b"\x01", self.flags[:])]
        if item.session.testsfailed == failed:
            with self.calls.open("a") as file:
                print(json.dumps([item.nodeid, time.monotonic() - began, called]), file=file)
        return result


if VARIABLE in os.environ:
    put_in(os.environ[VARIABLE])
RECORDER = Recorder(Path(os.environ[RECORD])) if RECORD in os.environ else None


def pytest_configure(config: pytest.Config) -> None:
    """Let the recorder, if there is one, see each test."""
    if RECORDER is not None:
        config.pluginmanager.register(RECORDER)
