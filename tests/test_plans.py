"""Every plan of the table: parity, bytes, memory, leaks and checkpoints, from one run of each."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from shardwise.core.plan.plan import WORDS
from shardwise.engine.state.box import Box
from shardwise.techniques.offload.word import WHAT
from shardwise.techniques.recompute.word import PARTITIONED_WORDS
from shardwise.verify.difference import tensor_errors
from shardwise.verify.finding import BoxPlace, Errors
from tests import covering
from tests.plan_runs import Run, run_in_16_bits, run_of, runner
from tests.plans import CANONICAL, ELSEWHERE, EQUAL_16, FEW_16, LONG, ON_PROCESSES, every_plan
from tests.pool import run_gloo

IN_16_BITS = [
    p for plan, words in EQUAL_16.items() for p in (plan, *(f"{plan} {w}" for w in words))
]


HOSTS = pytest.mark.skip(reason="updates on the host differ in bits from those of a GPU")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each fact of each plan, on the ranks of `--device`."""
    device = str(metafunc.config.getoption("--device"))
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda on a machine without a GPU that PyTorch sees")
    run_by = partial(runner, device)
    pairs = [(plan, word) for plan, words in EQUAL_16.items() for word in words]
    core = {p for plan in FEW_16 for p in (plan, *(f"{plan} {w}" for w in EQUAL_16[plan][:1]))}
    core |= ON_PROCESSES
    table = [plan for name, plans in CANONICAL.items() if name != LONG for plan in plans]
    again = [plan for plan in [*table, *CANONICAL[LONG]] if plan not in ON_PROCESSES]
    slow = [(f"{plan}, gloo", (run_gloo, plan)) for plan in again]
    if device == "cuda":
        slow = [(plan, (run_by(plan), plan)) for plan in CANONICAL[LONG]]
    slow += [(plan, (run_by(plan), plan)) for plan in covering.read()]
    cases: dict[str, list[tuple[str, Any, list[Any]]]] = {
        "run": [
            *((plan, (run_by(plan), plan), []) for plan in table),
            *((plan, how, [pytest.mark.full]) for plan, how in slow),
        ],
        "half": [(plan, (run_by(plan), plan), []) for plan in IN_16_BITS],
        "two": [
            (f"{p} {word}", (run_by(p), p, f"{p} {word}"), [HOSTS] if device == "cuda" else [])
            for p, word in pairs
        ],
    }
    for each in ("half", "two"):
        for plan, _, marks in cases[each]:
            marks += [] if plan in core else [pytest.mark.full]
    cases["scaled"] = [case for case in cases["half"] if "fp16" in case[0]]
    for name in cases.keys() & {*metafunc.fixturenames}:
        params = [pytest.param(value, id=plan, marks=own) for plan, value, own in cases[name]]
        metafunc.parametrize(name, params, indirect=True)


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest) -> Run:
    return run_of(*request.param)


@pytest.fixture
def half(request: pytest.FixtureRequest) -> Run:
    return run_in_16_bits(*request.param)


@pytest.fixture
def scaled(request: pytest.FixtureRequest) -> Run:
    return run_in_16_bits(*request.param)


@pytest.fixture
def two(request: pytest.FixtureRequest) -> tuple[Run, Run]:
    """The runs of a plan in 16 bits, without and with a word that changes no bit."""
    on_ranks, plain, other = request.param
    return run_in_16_bits(on_ranks, plain), run_in_16_bits(on_ranks, other)


def test_parity(run: Run):
    """Losses, tokens, norms, gradients, weights, states; and a step from what one process saved."""
    found = run.report
    assert found.first_difference is None
    assert found.uncovered == ""


def test_bytes(run: Run):
    """Every line of the ledger, of each step and of an evaluation, equals its prediction."""
    for rank in run.ranks:
        assert rank.costs.counted == rank.costs.theory
        assert rank.costs.hold


def test_memory(run: Run):
    """Bytes of every category on every tier equal their prediction."""
    for rank in run.ranks:
        assert rank.measured == rank.predicted


def test_nothing_is_left(run: Run):
    """Storages that the steps made are freed, or the engine's own."""
    assert [rank.leaks for rank in run.ranks] == [[]] * len(run.ranks)


def test_copies_are_equal(run: Run):
    """What several ranks hold of one tensor is the same on all of them, to the bit."""
    copies: dict[Any, torch.Tensor] = {}
    for box in (box for rank in run.ranks for box in rank.state):
        first = copies.setdefault((box.name, box.offsets, box.sizes), box.tensor)
        assert torch.equal(first, box.tensor), box.name


def test_no_bit_changes_in_16_bits(two: tuple[Run, Run]):
    """Losses, norms, gradients and states under a word are those without it, bit for bit."""
    for one, other in zip(two[0].ranks, two[1].ranks, strict=True):
        assert one.evaluated == other.evaluated
        steps = zip([*one.steps, *one.resumed], [*other.steps, *other.resumed], strict=True)
        for before, after in steps:
            assert (before.loss, before.norm) == (after.loss, after.norm)
            assert_equal(before.gradients, after.gradients)
        assert_equal(one.state, other.state)
        assert_equal(one.resumed_state, other.resumed_state)


def assert_equal(one: Sequence[Box], other: Sequence[Box]) -> None:
    assert BoxPlace.of(one) == BoxPlace.of(other)
    order = lambda box: (box.name, box.offsets, box.replica)  # noqa: E731
    for a, b in zip(sorted(one, key=order), sorted(other, key=order), strict=True):
        assert torch.equal(a.tensor, b.tensor), a.name


def test_near_one_process_in_16_bits(half: Run):
    """Losses are within 2 % of one process's in fp32, norms 5 %, gradients as precise."""
    wanted = half.expected
    digits = 0.02 if half.proof.precision == "fp16" else 0.08  # bf16 has three bits fewer
    for rank in half.ranks:
        for step, first, alone in zip(
            [*rank.steps, *rank.resumed],
            [*half.ranks[0].steps, *half.ranks[0].resumed],
            [*wanted.steps, *wanted.resumed],
            strict=True,
        ):
            assert (step.loss, step.norm) == (first.loss, first.norm)
            assert step.loss == pytest.approx(alone.loss, rel=0.02)
            assert step.norm == pytest.approx(alone.norm, rel=0.05)
        gradients = rank.steps[0].gradients
        ((errors, _),) = tensor_errors(gradients, [wanted.steps[0].gradients])
        assert isinstance(errors, Errors) and errors.largest <= digits
    assert half.report.uncovered == ""


def test_an_overflow_on_one_rank_is_skipped_by_all(scaled: Run):
    """No rank updates anything on any tier, and the loss scale is halved on all."""
    assert [rank.overflow for rank in scaled.ranks] == [(True, 0.5, True)] * len(scaled.ranks)


def test_costs_in_16_bits(half: Run):
    """Bytes of every line and memory on every tier are as predicted; copies are equal."""
    for fact in (test_bytes, test_memory, test_nothing_is_left, test_copies_are_equal):
        fact(half)


def there(start: str) -> bool:
    """Whether a plan that a hand wrote has a word that begins like this."""
    return any(word.startswith(start) for plan in every_plan() for word in plan.split())


@pytest.mark.parametrize("form", [word.form for word in WORDS])
def test_every_word_has_a_plan(form: str):
    """A plan word stands in a plan that a hand wrote, or in the list of those proved elsewhere."""
    assert there(re.sub("(N|[A-Z]+.*)$", "", form)) or form in ELSEWHERE


@pytest.mark.parametrize("value", [*PARTITIONED_WORDS, *WHAT])
def test_every_value_has_a_plan(value: str):
    """So does each value of the words `recompute` and `offload`, with any fraction."""
    known = re.compile(re.sub("0[.][0-9]+", "[0-9.]+", value) + "(=[0-9]+)?$")
    words = (word.partition(":")[2] for plan in every_plan() for word in plan.split())
    assert any(known.match(word) for word in words) or f"offload:{value}" in ELSEWHERE


def test_every_plan_of_the_array_can_be_read():
    """Its words are those of the factors, and it has no plan twice."""
    plans = covering.read()
    assert len({*plans}) == len(plans)
    assert [covering.text_of(covering.words_of(plan)) for plan in plans] == plans


@pytest.mark.full
def test_the_array_has_every_pair():
    """Two words that meet in no plan of the array or of `CANONICAL` cannot meet."""
    plans = map(covering.words_of, covering.read())
    found = covering.written().union(*map(covering.pairs_of, plans))
    missing = [s for s in covering.candidates() if not covering.pairs_of(s) <= found]
    assert not [s for s in missing if covering.can_meet(s)]
