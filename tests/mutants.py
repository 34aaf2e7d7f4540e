"""The judge of the suite: which core tests notice a fault of the package.

    python -m tests.mutants                  every fault; `make mutants` is this
    python -m tests.mutants "dp2 zero3"      the faults whose name has this text
    python -m tests.mutants --all            all tests that notice each fault, not the first only
    python -m tests.mutants --draw           draw new faults in place of those whose lines are gone

The faults of the catalogue (tests/verify/mutations.txt), and a hundred that are drawn
(tests/mechanical.py), stand in tests/mutants.txt, each with the tests that are known to notice it,
which run first, or with the reason why none can: `equivalent: ...`.
"""

import importlib
import json
import os
import re
import sys
import tempfile
import traceback
import types
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, NoReturn

import typer

from tests import mechanical

FILE = Path(__file__).with_suffix(".txt")
EQUIVALENT = "equivalent: "
HANGS_S = 300
OPTIONS = ["-q", "-p", "no:cacheprovider", "--tb=no", "-m"]
#: Tests that put mutations of their own into the package.
OWN = "tests/verify/test_mutations.py"
#: What the process that forks has imported.
IMPORTED = ("pytest", "torch._dynamo", "torch.distributed.run", "markdown_it")


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
    mechanical.put_in(fault)
    return pytest.main(arguments)


def _catalogue() -> None:
    from tests.verify.test_mutations import NAMED

    print(json.dumps([*NAMED]))


def failing(fault: str, tests: list[str], every: bool) -> list[str]:
    """The tests among these that fail with the fault, or the first; of no tests, the core's."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(tests))
        file.flush()
        chosen = ["", f"@{file.name}"] if tests else ["core", f"--deselect={OWN}"]
        options = ["-o", f"faulthandler_timeout={HANGS_S}", *(() if every else ("-x",))]
        said, code = forked(_pytest, fault, [*OPTIONS, *chosen, *options])
    if gone := re.findall(r"^ERROR: not found: \S*?(tests/.*)$", said, re.MULTILINE):
        left = [test for test in tests if test not in gone]
        return failing(fault, left, every) if left and len(left) < len(tests) else []
    found = re.findall(r"^(?:FAILED|ERROR) (\S+.*?)(?: - .*)?$", said, re.MULTILINE)
    # a process that ends within a test does not say which one
    return found or ([f"({tests[:1]}, or one after it, ends with {code})"] if code else [])


def judged(chosen: Sequence[str], known: Known, every: bool, jobs: int) -> Iterator[str]:
    """The faults that no test notices. Those that are known to notice one run first."""

    def noticed(fault: str) -> bool:
        if mechanical.is_drawn(fault) and not mechanical.stands(fault):
            print(f"STALE {fault}: its line is gone; --draw draws another", flush=True)
            return False  # its import would fail, as if a test had noticed it
        said = [] if every else known.said[fault]
        found = (said and failing(fault, said, every)) or failing(fault, [], every)
        print(f"{fault}: {', '.join(found)}" if found else f"SURVIVES {fault}", flush=True)
        known.add(fault, found, every)
        return bool(found)

    with ThreadPoolExecutor(jobs) as pool:
        found = zip(chosen, pool.map(noticed, chosen), strict=True)
        yield from [fault for fault, good in found if not good]


def main(
    text: Annotated[list[str] | None, typer.Argument(help="Of names; none: all.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All tests that notice a fault.")] = False,
    draw: Annotated[bool, typer.Option("--draw", help="Draw faults for lines that went.")] = False,
    jobs: Annotated[int, typer.Option(help="Runs at once.")] = 2,
) -> None:
    """Print a line for each fault. Ends with 1 if any survives."""
    for module in IMPORTED:
        importlib.import_module(module)
    known = Known()
    said, _ = forked(_catalogue)
    drawn = [name for name in known.said if mechanical.is_drawn(name)]
    known.keep([*json.loads(said.splitlines()[-1]), *(mechanical.draw(drawn) if draw else drawn)])
    chosen = [f for f in known.said if not text or any(part in f for part in text)]
    chosen = [fault for fault in chosen if not known.equivalent(fault)]
    survivors = [] if draw else [*judged(chosen, known, every, jobs)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults are noticed")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    typer.run(main)
