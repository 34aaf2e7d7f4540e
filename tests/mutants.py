"""The judge of the suite: the core test that notices each mutation of the catalogue, if one does.

    python -m tests.mutants                the whole catalogue; `make mutants` is this
    python -m tests.mutants "dp2 zero3"    the mutations whose name or plan has this text
    python -m tests.mutants --table        only by the table of plans (tests/test_plans.py)

The core tests run once, and it is noted which of the functions that mutations replace each of them
calls (tests/mutated.py). Then each mutation is put into a run of the tests that call its function,
the quickest first, until one fails. `--calls FILE` keeps what they call for another judge.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tests.mutated import RECORD, VARIABLE
from tests.verify.mutations.mutation import Mutation
from tests.verify.test_mutations import CATALOGUE

AT_ONCE = 2
#: The tests of a mutation run in parts of this many seconds, then of this many times more.
FIRST_S, TIMES = 20.0, 8.0
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no"]
#: Tests that put mutations of their own into the package.
OWN = "tests/verify/test_mutations.py"
TABLE = "tests/test_plans.py"


@dataclass(frozen=True)
class Test:
    """A core test: the seconds it takes, and the mutations of a function that it calls."""

    name: str
    seconds: float
    calls: frozenset[int]


def called(tests: Sequence[str]) -> list[Test]:
    """Run the core tests; what each calls, the quickest test first."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*PYTEST, "-n", str(AT_ONCE), "--dist", "worksteal", f"--deselect={OWN}", *tests]
        subprocess.run(command, check=False, env=os.environ | {RECORD: folder})
        lines = [line for file in Path(folder).glob("*.calls") for line in file.open()]
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


def noticing(mutation: Mutation, tests: Sequence[Test]) -> tuple[str, float]:
    """The first test that fails with the mutation, or nothing; and the seconds it took to know."""
    began = time.monotonic()
    number = CATALOGUE.index(mutation)
    said = ""
    for part in parts([test for test in tests if number in test.calls]):
        if said := failing(mutation.name, part):
            break
    return said, time.monotonic() - began


def failing(name: str, tests: list[str]) -> str:
    """The first of these tests that fails with the mutation, or nothing."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(tests))
        file.flush()
        command = [*PYTEST, "-m", "", "-x", f"@{file.name}"]
        how: dict[str, Any] = {"env": os.environ | {VARIABLE: name}, "text": True}
        done = subprocess.run(command, check=False, capture_output=True, **how)
    found = re.search(r"^(?:FAILED|ERROR) (\S+.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return found[1] if found else "" if done.returncode == 0 else f"pytest {done.returncode}"


def judge(
    text: Annotated[list[str] | None, typer.Argument(help="Of names or plans; none: all.")] = None,
    table: Annotated[bool, typer.Option(help="Only by the table of plans.")] = False,
    calls: Annotated[Path | None, typer.Option(help="Where what tests call is kept.")] = None,
) -> None:
    """Print a line for each mutation, and the survivors. Ends with 1 if there are any."""
    chosen = [m for m in CATALOGUE if not text or any(part in m.id for part in text)]
    if calls and calls.exists():
        tests = [Test(n, s, frozenset(c)) for n, s, c in json.loads(calls.read_text())]
    else:
        tests = called([TABLE] if table else [])
    if calls:
        calls.write_text(json.dumps([[t.name, t.seconds, sorted(t.calls)] for t in tests]))
    tests = [test for test in tests if not table or test.name.startswith(TABLE)]
    survivors = list[Mutation]()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda mutation: (mutation, *noticing(mutation, tests)), chosen)
        for mutation, said, seconds in found:
            print(f"{seconds:5.0f} s  {mutation.id}: {said or 'SURVIVES'}", flush=True)
            survivors += [] if said else [mutation]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations are noticed")
    for mutation in survivors:
        print(f"  survives: {mutation.id}")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    typer.run(judge)
