"""`shardwise verify PLAN`: a plan proved on a model, with what was found as a table or as JSON.

A plan without a precision runs in fp64. It holds when, on every rank,

    parity   no error (see proof.py) is above the precision's tolerance
    bytes    every step sent what the formulas say, to the byte, by axis, kind and phase
    memory   after the last step each category holds what the formulas say, to the byte

Tolerances: 1e-10 in fp64, 1e-5 in fp32. With 16 bits, 8 eps (2^-4 in bf16, 2^-7 in fp16): each
rank's gradient passes through as many rounded products as the model is deep, in another order of
rows than the whole batch's, and is rounded once more before and after it is summed; each of these
is half an eps, they add up like the square root of their number, and a small deep model has on the
order of 100. A gradient that is missing, doubled or another rank's is wrong by 1/2 or more.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shardwise.comm.launch import spawn
from shardwise.comm.local import require_local
from shardwise.comm.rendezvous import environment
from shardwise.comm.world import init
from shardwise.core.check import require
from shardwise.core.errors import RankError, RunError, bad
from shardwise.core.plan import Plan
from shardwise.train.gathered import gathered
from shardwise.train.proof import Errors, Finding, prove
from shardwise.train.trial import tried
from shardwise.train.unlike import unlike_one_process

MOST_MICROBATCHES = 512  # of two rows each
TOLERANCES = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 8 * 2.0**-7, "fp16": 8 * 2.0**-10}


@dataclass(frozen=True)
class Difference:
    """A tensor that differs by more than the tolerance: of which kind, its name, on which rank."""

    kind: str
    name: str
    rank: int
    error: float


@dataclass(frozen=True)
class Report:
    """What all ranks found.

    Bytes and memory are of the first rank whose numbers disagree with the formula, or of rank 0.
    `note` is why such a model cannot match one process (see unlike.py), where that is so.
    """

    plan: str
    model: str
    holds: bool
    parity: dict[str, float]
    sent: dict[str, dict[str, int]]
    memory: dict[str, dict[str, int]]
    first_difference: Difference | None
    note: str = ""

    def json(self) -> str:
        """One JSON object: plan, model, holds, parity, bytes, memory, first_difference."""
        first = self.first_difference
        found = {
            "plan": self.plan,
            "model": self.model,
            "holds": self.holds,
            "parity": self.parity,
            "bytes": self.sent,
            "memory": self.memory,
            "first_difference": first and vars(first),
        }
        return json.dumps(found)


def verify(plan: Plan | str, model: str = "gpt", steps: int = 3) -> Report:
    """Prove `plan` on `model`: on the ranks that torchrun or Slurm started, else on new ones.

    Called by all ranks of a world. Raises InputError for a plan that cannot run, a model there is
    not, steps below 1; RankError when a rank fails.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    plan = replace(plan, precision=plan.precision or "fp64")
    if steps < 1:
        raise bad(f"--steps {steps}", "one step or more", "--steps 3")
    started = environment() is not None
    require(plan)
    _require_small(plan)
    if not started:
        require_local(plan.size)
    # a bad name or model is answered here, before anything starts
    note = unlike_one_process(tried(model, plan), plan)
    if not started:
        findings = _on_new_ranks(plan, model, steps, note)
    else:
        world = init()
        require(plan, world.size)
        findings = gathered(prove(world, plan, model, steps), world)
    return replace(report(plan, model, findings), note=note)


def _require_small(plan: Plan) -> None:
    """Raise InputError where the one process beside the plan would need a huge batch."""
    most = MOST_MICROBATCHES // plan.data_size
    if plan.microbatches > max(1, most):
        raise bad(
            f"{plan.microbatches} microbatches a rank in a proof of the plan '{plan}'",
            f"at most {MOST_MICROBATCHES} microbatches in all, which one process computes at once",
            f"'{_smaller(plan, most)}', which proves the same",
        )


def _smaller(plan: Plan, most: int) -> Plan:
    """The plan with few microbatches: every schedule has one of twice as many as it has ranks."""
    schedule, ranks = plan.schedule, plan.mesh.size_of("pp")
    if schedule is not None and ":" in schedule:
        name, _, numbers = schedule.partition(":")
        _, x, chunks = numbers.partition("x")
        schedule = f"{name}:{2 * ranks}{x}{chunks}"
    few = replace(plan, schedule=schedule, accumulate=1)
    return replace(few, accumulate=min(2, plan.accumulate, max(1, most // few.microbatches)))


def _on_new_ranks(plan: Plan, model: str, steps: int, note: str) -> list[Finding]:
    try:
        return spawn(_on_rank, plan.size, (plan, model, steps))
    except RankError as error:
        if not note:
            raise
        # batch norm refuses a rank that has a single row, for example
        why = error.text.splitlines()[-1]
        raise RunError(f"{note} Rank {error.rank} could not go on: {why}") from None


def _on_rank(plan: Plan, model: str, steps: int) -> Finding:
    world = init("cpu")
    found = prove(world, plan, model, steps)
    world.barrier()
    return found


def report(plan: Plan, model: str, findings: Sequence[Finding]) -> Report:
    """What the ranks found, as one; a rank that differs is named."""
    tolerance = TOLERANCES[plan.precision or "fp64"]
    parity: dict[str, float] = {}
    differences: list[Difference] = []
    later: list[Difference] = []  # a loss, which a wrong gradient makes wrong a step later
    for by_rank in zip(*(finding.errors for finding in findings), strict=True):  # one kind each
        kind, largest = by_rank[0].kind, max(errors.largest for errors in by_rank)
        parity[kind] = max(parity.get(kind, 0.0), largest)
        for errors, finding in zip(by_rank, findings, strict=True):
            found = later if errors.kind == "loss" else differences
            found += _first(errors, finding.rank, tolerance)
    differences += later
    bytes_off = [f for f in findings if not f.bytes_hold]
    memory_off = [f for f in findings if f.memory_measured != f.memory_predicted]
    sent, held = [*bytes_off, findings[0]][0], [*memory_off, findings[0]][0]
    return Report(
        str(plan),
        model,
        not (differences or bytes_off or memory_off),
        parity,
        {"measured": sent.bytes_measured, "predicted": sent.bytes_predicted},
        {"measured": held.memory_measured, "predicted": held.memory_predicted},
        differences[0] if differences else None,
    )


def _first(errors: Errors, rank: int, tolerance: float) -> list[Difference]:
    """The first of a rank's tensors whose error is too large, in the order of the model."""
    pairs = zip(errors.names, errors.errors, strict=True)
    wrong = ((name, error) for name, error in pairs if not error <= tolerance)
    return [Difference(errors.kind, name, rank, error) for name, error in wrong][:1]


def verify_command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help='Such as "dp2 zero3 bf16".')],
    model: Annotated[str, typer.Option(help="gpt, gpt:SIZE, hf:NAME or file.py:build.")] = "gpt",
    steps: Annotated[int, typer.Option(help="How many steps to train.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove a plan: it computes what one process does, and sends and holds what it must."""
    start = environment()
    with Console(stderr=True).status(f"{plan} on {model}: {steps} steps, beside one process"):
        found = verify(plan, model, steps)
    if start is None or start.rank == 0:
        if as_json:
            print(found.json())
            if found.note and not found.holds:
                print(found.note, file=sys.stderr)
        else:
            show(found, Console())
    raise typer.Exit(0 if found.holds else 1)


def show(found: Report, console: Console) -> None:
    """The report as a table, and whether the plan holds."""
    tolerance = TOLERANCES[Plan.parse(found.plan).precision or "fp64"]
    table = Table("", "measured", "predicted", "", title=f"{found.plan} on {found.model}")
    for kind, error in found.parity.items():
        table.add_row(
            f"error: {kind}", f"{error:.1e}", f"<= {tolerance:.1e}", _mark(error <= tolerance)
        )
    for what, both in (("sent", found.sent), ("held", found.memory)):
        table.add_section()
        for name in both["predicted"] | both["measured"]:
            measured, predicted = both["measured"].get(name, 0), both["predicted"].get(name, 0)
            cells = f"{what}: {name}", f"{measured:,} B", f"{predicted:,} B"
            table.add_row(*cells, _mark(measured == predicted))
    console.print(table)
    first = found.first_difference
    if first is not None:
        error = f"relative error {first.error:.1e}"
        console.print(
            f"The first that differs: {first.kind}, {first.name}, on rank {first.rank}; {error}"
        )
    console.print("It holds." if found.holds else "It does not hold.")
    if found.note and not found.holds:
        console.print(found.note)


def _mark(good: bool) -> str:
    return "=" if good else "differs"
