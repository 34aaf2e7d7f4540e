"""The judge of the suite: which test notices each mutation of the catalogue, and which none does.

    python -m tests.mutants                the whole catalogue; `make mutants` is this
    python -m tests.mutants "dp2 zero3"    the mutations whose name or plan has this text
    python -m tests.mutants --table        which of them the table notices

Each mutation is put into a process of its own, first for the facts of the table (tests/plans.py) in
threads, the plans nearest to the mutation's first, until one fails.  For those that no plan notices
run the core tests that import what the mutation patches, then those of all folders, until one
fails.
"""

import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests import plan_runs, test_plans
from tests.mutated import VARIABLE, apply, modules_of
from tests.plans import CANONICAL, EQUAL_16
from tests.pool import run_threads
from tests.verify.mutations.mutation import Mutation
from tests.verify.test_mutations import CATALOGUE, NAMED

AT_ONCE = 2
TABLE_ALONE = "--table"
NEAREST = 16  # plans that are tried before the tests of folders
SECONDS, TEST_SECONDS = 300, 1800  # after which one plan, and the tests of folders, hang
PLANS = [plan for plans in CANONICAL.values() for plan in plans]
IN_16_BITS = {
    f"{plan} {word}".strip(): (plan, word)
    for plan, words in EQUAL_16.items()
    for word in ("", *words)
}
FACTS: list[Callable[[plan_runs.Run], None]] = [
    *(test_plans.test_parity, test_plans.test_bytes, test_plans.test_memory),
    *(test_plans.test_nothing_is_left, test_plans.test_a_checkpoint_of_one_process_goes_on),
]
HALF_FACTS = [test_plans.test_near_one_process_in_16_bits, test_plans.test_costs_in_16_bits]
OVERFLOW = test_plans.test_an_overflow_on_one_rank_is_skipped_by_all
#: Folders of tests beside that of the package's folder; in their order all are tried.
FOLDERS = ("engine", "parallel", "expert", "predict", "core", "comm", "checkpoint", "verify")


# --- the table ------------------------------------------------------------------------------------


def nearness(mutation: Mutation, plan: str) -> float:
    """The share of words that a plan has in common with the mutation's."""
    mixture = {"moe", "sigmoid", "choice"}
    one, other = (set(re.sub("[|:=]", " ", text).split()) for text in (mutation.plan, plan))
    experts = (mutation.model in mixture) == (plan_runs.kind_of(plan) == "mixture")
    return len(one & other) / len(one | other) + 0.5 * experts


def checks(mutation: Mutation) -> Iterator[tuple[str, Callable[[], None]]]:
    """Facts of plans, the nearest plans first."""
    every = sorted([*PLANS, *IN_16_BITS], key=lambda plan: -nearness(mutation, plan))
    for plan in every[:NEAREST]:
        if plan in PLANS:
            yield plan, partial(_facts, plan)
            continue
        for fact in [*HALF_FACTS, *([OVERFLOW] if "fp16" in plan else [])]:
            yield f"{fact.__name__}[{plan}]", partial(_of_halves, fact, plan)
        plain, word = IN_16_BITS[plan]
        if word:
            bits = test_plans.test_no_bit_changes_in_16_bits
            yield f"{bits.__name__}[{plan}]", partial(_same_bits, plain, plan)


def _of_halves(fact: Callable[[plan_runs.Run], None], plan: str) -> None:
    fact(plan_runs.run_in_16_bits(run_threads, plan))


def _same_bits(plain: str, plan: str) -> None:
    one, other = (plan_runs.run_in_16_bits(run_threads, text) for text in (plain, plan))
    test_plans.test_no_bit_changes_in_16_bits((one, other))


def _facts(plan: str) -> None:
    run = plan_runs.run_of(run_threads, plan)
    for fact in FACTS:
        try:
            fact(run)
        except AssertionError as error:
            raise AssertionError(fact.__name__) from error


def first_noticing(mutation: Mutation) -> str:
    """The test of the table that fails first, or nothing."""
    for name, check in checks(mutation):
        signal.alarm(SECONDS)  # ends the process, with the signal as its exit code
        try:
            check()
        except AssertionError as error:
            return f"{error}[{name}]" if str(error).startswith("test_") else name
        except Exception as error:  # noqa: BLE001 - a run that fails is a test that fails
            return f"{name} ({type(error).__name__})"
    return ""


def in_the_table(name: str, answers: Any) -> None:
    """One process: a mutation, and the plans until one notices it."""
    apply(name)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        answers.put((name, first_noticing(NAMED[name])))


# --- the tests of folders -------------------------------------------------------------------------


def relevant(modules: Iterable[str]) -> tuple[list[str], list[str]]:
    """Files of tests that import one of the modules; and all folders, the modules' own first."""
    own = [module.split(".")[1:3] for module in modules if module.startswith("shardwise.")]
    first = [part for parts in own for part in (parts[-1], parts[0]) if part in FOLDERS]
    imports = [f"from {module} import" for module in modules]
    files = [str(path) for path in sorted(Path("tests").rglob("test_*.py"))]
    near = [one for one in files if any(line in Path(one).read_text() for line in imports)]
    return near, [f"tests/{folder}" for folder in dict.fromkeys([*first, *FOLDERS])]


def in_the_tests(name: str) -> str:
    """The core test that fails first, or nothing."""
    patch = apply(name)
    near, every = relevant(modules_of(patch))
    patch.undo()
    said = failing(name, near) if near else ""
    return said or failing(name, [*every, "tests/test_plans.py"])


def failing(name: str, paths: list[str]) -> str:
    """The core test of these files or folders that fails first, or nothing."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no"),
        *("--deselect", "tests/verify/test_mutations.py", *paths),
    ]
    environment = os.environ | {VARIABLE: name}
    how: dict[str, Any] = {"env": environment, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, check=False, timeout=TEST_SECONDS, **how)
    except subprocess.TimeoutExpired:
        return "a test that does not end"
    found = re.search(r"^(?:FAILED|ERROR) (\S+.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    # 5: of these files no test is core
    return found[1] if found else "" if done.returncode in {0, 5} else f"pytest {done.returncode}"


# --- the judge ------------------------------------------------------------------------------------


def judged(names: list[str]) -> Iterator[tuple[str, str, float]]:
    """Each mutation, the test of the table that notices it or nothing, and the seconds it took."""
    context = multiprocessing.get_context("fork")  # of this process, which has imported torch
    answers: Any = context.SimpleQueue()
    waiting, running = list(reversed(names)), dict[str, tuple[Any, float]]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = waiting.pop()
            process = context.Process(target=in_the_table, args=(name, answers))
            process.start()
            running[name] = process, time.monotonic()
        time.sleep(0.05)
        found = dict[str, str]()
        while not answers.empty():
            name, said = answers.get()
            found[name] = said
        for name, (process, since) in list(running.items()):
            if name in found or process.exitcode is not None:
                said = found.get(name, f"a process that ends with {process.exitcode}")
                process.kill()
                process.join()
                del running[name]
                yield name, said, time.monotonic() - since


def main(words: list[str]) -> int:
    """Print a line for each mutation, and the survivors.  1 if there are any."""
    torch.set_num_threads(1)
    names = [word for word in words if word != TABLE_ALONE]
    chosen = [m.name for m in CATALOGUE if not names or any(name in m.id for name in names)]
    plan_runs.run_of(run_threads, "dp2 zero3")  # what torch imports late, once
    for kept in (plan_runs.trained_alone, plan_runs.checkpoint):
        kept.cache_clear()
    unnoticed = list[str]()
    for name, said, seconds in judged(chosen):
        print(f"{seconds:5.0f} s  {NAMED[name].id}: {said or 'noticed by no plan'}", flush=True)
        unnoticed += [] if said else [name]
    survivors = unnoticed if TABLE_ALONE in words else [n for n in unnoticed if not by_tests(n)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations are noticed")
    for name in survivors:
        print(f"  survives: {NAMED[name].id}")
    return int(bool(survivors))


def by_tests(name: str) -> str:
    """The core test beside the table that fails first, which is printed."""
    began = time.monotonic()
    said = in_the_tests(name)
    seconds = time.monotonic() - began
    print(f"{seconds:5.0f} s  {NAMED[name].id}: {said or 'SURVIVES'}", flush=True)
    return said


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
