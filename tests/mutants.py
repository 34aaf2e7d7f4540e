"""The judge of the suite: which core tests notice a fault of the package.

    python -m tests.mutants                  every fault; `make mutants` is this
    python -m tests.mutants "dp2 zero3"      the faults whose name has this text
    python -m tests.mutants --all            all tests that notice each fault, not the first only
    python -m tests.mutants --draw           draw new faults in place of those whose lines are gone

The faults of the catalogue (tests/verify/mutations), and a hundred that are drawn
(tests/mechanical.py), stand in tests/mutants.txt, each with the tests that are known to notice it,
which run first, or with the reason why none can: `equivalent: ...`. Then the core tests run once to
note which functions each calls, in the folder `--calls`. A fault is put into a run of those that
call its function, the quickest first.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, NoReturn

import typer

from tests import mechanical

FILE = Path(__file__).with_suffix(".txt")
EQUIVALENT = "equivalent: "
#: The tests of a mutation run in parts of this many seconds, then of this many times more.
FIRST_S, TIMES = 20.0, 8.0
HANGS_S = 300
OPTIONS = ["-q", "-p", "no:cacheprovider", "--tb=no", "-p", "tests.mutated", "-m"]
#: Tests that put mutations of their own into the package.
OWN = "tests/verify/test_mutations.py"
#: What the process that forks has imported.
IMPORTED = ("pytest", "torch._dynamo", "torch.distributed.run", "markdown_it")


@dataclass(frozen=True)
class Test:
    """A core test: the seconds it takes, and the functions that it calls, by their numbers."""

    name: str
    seconds: float
    calls: frozenset[int]


class Known:
    """What tests/mutants.txt says of each fault: tests, or why it is equivalent."""

    def __init__(self) -> None:
        self.said: dict[str, list[str]] = {}
        self.lock = Lock()
        for line in FILE.read_text().splitlines() if FILE.exists() else []:
            if line.startswith(" "):
                self.said[[*self.said][-1]].append(line.strip())
            elif line:
                self.said[line] = []

    def equivalent(self, fault: str) -> bool:
        """Whether no test can notice the fault."""
        return any(said.startswith(EQUIVALENT) for said in self.said[fault])

    def keep(self, names: Iterable[str]) -> None:
        """Keep the faults of these names only, in their order."""
        self.said = {name: self.said.get(name, []) for name in names}
        self.write()

    def add(self, fault: str, tests: list[str], every: bool) -> None:
        """Note which tests notice a fault; `every` test, or one more. One case of each function."""
        before = [] if every or not tests else self.said[fault]
        functions = {test.partition("[")[0]: test for test in [*tests, *before]}
        with self.lock:
            self.said[fault] = sorted(functions.values())
            self.write()

    def write(self) -> None:
        lines = [[name, *(f"    {text}" for text in said)] for name, said in self.said.items()]
        FILE.write_text("\n".join(line for part in lines for line in part) + "\n")


def forked(function: Any, *args: Any) -> tuple[str, int]:
    """The output of a function in a fork of this process, and its exit code."""
    with tempfile.TemporaryFile("w+") as output:
        if not (process := os.fork()):
            _run(function, args, output.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        output.seek(0)
        return output.read(), code


def _run(function: Any, args: tuple[Any, ...], output: int) -> NoReturn:
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.modules["__main__"] = types.ModuleType("__main__")  # which ranks do not import
    code = 70
    try:
        code = int(function(*args) or 0)
    except BaseException:  # noqa: BLE001 nothing of the parent may go on here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _pytest(fault: str, arguments: list[str]) -> int:
    import pytest

    os.environ[mechanical.VARIABLE] = fault
    return pytest.main(arguments)


def _replaced() -> None:
    from tests.mutated import replaced

    print(json.dumps(replaced()))


def recorded(folder: Path, jobs: int) -> list[Test]:
    """What each core test calls, the quickest test first; they run unless the folder has it."""
    if not [*folder.glob("*.calls")]:
        command = [*(sys.executable, "-m", "pytest", "-n", str(jobs), "--dist", "worksteal")]
        variables = os.environ | {mechanical.RECORD: str(folder)}
        command += [*OPTIONS, "core", f"--deselect={OWN}"]
        subprocess.run(command, check=False, env=variables)
    lines = {line for file in folder.glob("*.calls") for line in file.open()}
    found = [Test(n, s, frozenset(c)) for n, s, c in map(json.loads, lines)]
    return sorted(found, key=lambda test: test.seconds)


def parts(tests: Sequence[Test]) -> Iterator[list[str]]:
    """The names of the tests, in parts that take longer and longer."""
    part, spent, most = list[str](), 0.0, FIRST_S
    for test in tests:
        part.append(test.name)
        spent += test.seconds
        if spent >= most:
            yield part
            part, spent, most = [], 0.0, most * TIMES
    if part:
        yield part


def failing(fault: str, tests: list[str], every: bool) -> list[str]:
    """The tests among these that fail with the fault, or the first of them."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(tests))
        file.flush()
        options = ["-o", f"faulthandler_timeout={HANGS_S}", *(() if every else ("-x",))]
        said, code = forked(_pytest, fault, [*OPTIONS, "", *options, f"@{file.name}"])
    if gone := re.findall(r"^ERROR: not found: \S*?(tests/.*)$", said, re.MULTILINE):
        left = [test for test in tests if test not in gone]
        return failing(fault, left, every) if left and len(left) < len(tests) else []
    found = re.findall(r"^(?:FAILED|ERROR) (\S+.*?)(?: - .*)?$", said, re.MULTILINE)
    # a process that ends within a test does not say which one
    return found or ([f"({tests[0]}, or one after it, ends with {code})"] if code else [])


def notices(fault: str, tests: Sequence[Test], every: bool) -> list[str]:
    """The tests that notice a fault, of those that call its function."""
    found = list[str]()
    for part in parts(tests):
        found += failing(fault, part, every)
        if found and not every:
            break
    return found


class Tests:
    """The core tests, and which of them call the functions that a fault changes."""

    def __init__(self, folder: Path, jobs: int, replaced: dict[str, list[str] | None]) -> None:
        self.folder, self.jobs, self.replaced = folder, jobs, replaced

    @cached_property
    def all(self) -> list[Test]:
        return recorded(self.folder, self.jobs)

    def of(self, fault: str) -> list[Test]:
        """Those that call a function of the fault, or all where it is not known what it changes."""
        functions = self.replaced.get(fault, [mechanical.function_of(fault)])
        numbers = {mechanical.number(function) for function in functions or ()}
        return [test for test in self.all if functions is None or test.calls & numbers]


def judged(
    chosen: Sequence[str], tests: Tests, known: Known, every: bool, jobs: int
) -> Iterator[str]:
    """The faults that no test notices. Those that are known to notice one run first."""

    def noted(fault: str, found: list[str]) -> list[str]:
        if found:
            print(f"{fault}: {', '.join(found)}", flush=True)
            known.add(fault, found, every)
        return found

    def by_known(fault: str) -> list[str]:
        said = known.said[fault]
        return noted(fault, failing(fault, said, every)) if said and not every else []

    def by_all(fault: str) -> list[str]:
        return noted(fault, notices(fault, tests.of(fault), every))

    left = list(chosen)
    for judge in (by_known, by_all):
        with ThreadPoolExecutor(jobs) as pool:
            found = dict(zip(left, pool.map(judge, left), strict=True))
        left = [fault for fault in left if not found[fault]]
    for fault in left:
        print(f"SURVIVES {fault}")
        known.add(fault, [], every)
        yield fault


def main(
    text: Annotated[list[str] | None, typer.Argument(help="Of names; none: all.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All tests that notice a fault.")] = False,
    draw: Annotated[bool, typer.Option("--draw", help="Draw faults for lines that went.")] = False,
    calls: Annotated[Path | None, typer.Option(help="Where what tests call is kept.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at once.")] = 2,
) -> None:
    """Print a line for each fault. Ends with 1 if any survives."""
    for module in IMPORTED:
        importlib.import_module(module)
    known = Known()
    text_of_replaced, _ = forked(_replaced)
    replaced = json.loads(text_of_replaced.splitlines()[-1])
    drawn = [name for name in known.said if " | " in name]
    with tempfile.TemporaryDirectory() as folder:
        tests = Tests(calls or Path(folder), jobs, replaced)
        if draw:
            called = frozenset[int]().union(*(test.calls for test in tests.all))
            drawn = mechanical.draw(called, drawn)
        known.keep([*replaced, *drawn])
        chosen = [f for f in known.said if not text or any(part in f for part in text)]
        chosen = [fault for fault in chosen if not known.equivalent(fault)]
        survivors = [] if draw else [*judged(chosen, tests, known, every, jobs)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults are noticed")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    typer.run(main)
