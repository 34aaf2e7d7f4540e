"""The report of a proof over all ranks, as a table or JSON.

    errors    the largest of each kind, and its bound
    bytes     theory    by the formulas of prediction/, from the model's shapes and the plan alone
              counted   by the transports of the run
    memory    theory    by formulas
              read      from the system: the sizes of the storages of live tensors

Bounds: 1e-10 in fp64, 1e-5 in fp32, of the largest value of a tensor (difference.py). In 16 bits an
error is a multiple of the error of one process in that precision, at most 1.5 (rounding.py).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console
from rich.table import Table

from shardwise.core.plan.plan import Plan
from shardwise.verify.coverage import uncovered
from shardwise.verify.finding import Errors, Finding, Parts
from shardwise.verify.oracles import rounding

BOUNDS = {"fp64": 1e-10, "fp32": 1e-5, "bf16": rounding.MOST, "fp16": rounding.MOST}
#: The columns of the report, and the source of their numbers.
COLUMNS = {"theory": "theory", "counted": "counted", "read": "read from the system"}
WIDTH = 100  # of the report as text
#: A wrong gradient makes these wrong as well, so they are named last.
LATE = ("loss", "evaluation", "outputs", "after loading")

#: What is compared, by column and then by name.
Columns = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Difference:
    """A tensor whose error is above the bound: its kind, its name, and the rank."""

    kind: str
    name: str
    rank: int
    error: float


@dataclass(frozen=True)
class ReportRow:
    """One line of a report, and whether it holds.

    `part` is "parity", with the values "error" and "bound"; or "sent" or "held", with the bytes of
    one rank by their source: "theory" and "counted" or "read".
    """

    part: str
    name: str
    values: dict[str, float]
    holds: bool


@dataclass(frozen=True)
class Report:
    """The results of all ranks.

    Bytes and memory are of the first rank whose numbers disagree with theory, or of rank 0.
    `uncovered` names a tensor that the ranks together do not compare exactly once, or is empty.
    `note` says why the model cannot match one process, and `changed` what the proof changed in it
    (not_comparable.py); both may be empty. `strays` lists that rank's storages in no category
    (memory_proof.py). `activations` are the predicted bytes that autograd keeps. `peak_bytes` are
    the most that is stored on the device at a moment of a step but for temporary bytes, and
    `peak_read` the same as measured. `depends` names the parts of the prediction that depend on
    values.
    """

    plan: str
    model: str
    holds: bool
    parity: dict[str, float]
    sent: Columns
    memory: Columns
    first_difference: Difference | None
    uncovered: str = ""
    note: str = ""
    changed: str = ""
    strays: str = ""
    activations: int = 0
    depends: tuple[str, ...] = ()
    peak_bytes: int = 0
    peak_read: int = 0

    @property
    def bound(self) -> float:
        """The bound on the errors."""
        return BOUNDS[Plan.parse(self.plan).precision or "fp64"]

    @property
    def rows(self) -> list[ReportRow]:
        """The lines of the table."""
        found = [
            ReportRow("parity", kind, {"error": error, "bound": self.bound}, error <= self.bound)
            for kind, error in self.parity.items()
        ]
        for part, columns in (("sent", self.sent), ("held", self.memory)):
            for name in dict.fromkeys(name for column in columns.values() for name in column):
                values = {key: column.get(name, 0) for key, column in columns.items()}
                found.append(ReportRow(part, name, dict(values), len(set(values.values())) == 1))
        return found

    def __str__(self) -> str:
        """The tables that `shardwise verify` prints."""
        text = StringIO()
        show(self, Console(file=text, width=WIDTH, emoji=False, markup=False))
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    @property
    def notes(self) -> list[str]:
        """The notes below the table."""
        why = "" if self.holds else self.note
        said = (f"Prediction: {note}." for note in self.depends)
        return [note for note in (why, self.changed, *said) if note]

    def json(self) -> str:
        """One JSON object with the fields of the report, and the meaning of its columns."""
        first = self.first_difference
        found = {
            "plan": self.plan,
            "model": self.model,
            "holds": self.holds,
            "bound": self.bound,
            "parity": self.parity,
            "bytes": self.sent,
            "memory": self.memory,
            "activations": {"theory": self.activations},
            "device_peak": {"theory": self.peak_bytes, "read": self.peak_read},
            "first_difference": first and vars(first),
            "uncovered": self.uncovered,
            "strays": self.strays,
            "columns": COLUMNS,
        }
        return json.dumps(found)


def report(plan: Plan, model: str, findings: Sequence[Finding]) -> Report:
    """Combine the ranks' results, and name a rank whose results differ."""
    bound = BOUNDS[plan.precision or "fp64"]
    parity: dict[str, float] = {}
    differences: list[Difference] = []
    for by_rank in zip(*(finding.errors for finding in findings), strict=True):  # one kind each
        compared = _errors_of(by_rank)
        kind, largest = compared[0].kind, max(errors.largest for errors in compared)
        parity[kind] = max(parity.get(kind, 0.0), largest)
        for errors, finding in zip(compared, findings, strict=True):
            differences += _first(errors, finding.rank, bound)
    differences.sort(key=lambda difference: difference.kind in LATE)
    bytes_off = [f for f in findings if not f.bytes_hold]
    memory_off = [f for f in findings if f.memory_measured != f.memory_predicted]
    sent, held = [*bytes_off, findings[0]][0], [*memory_off, findings[0]][0]
    lacking = _uncovered(plan, findings)
    return Report(
        str(plan),
        model,
        not (differences or bytes_off or memory_off or lacking),
        parity,
        {"theory": sent.costs.theory, "counted": sent.costs.counted},
        {"theory": held.memory_predicted, "read": held.memory_measured},
        differences[0] if differences else None,
        lacking,
        strays=held.strays,
        activations=sent.costs.activations,
        depends=sent.costs.notes,
        peak_bytes=sent.costs.peak_bytes,
        peak_read=sent.costs.peak_read,
    )


def largest(finding: Finding) -> float:
    """The largest error on one rank, in the units of its bound."""
    return max(errors.largest for found in finding.errors for errors in _errors_of([found]))


def _errors_of(by_rank: Sequence[Errors | Parts]) -> list[Errors]:
    parts = [found for found in by_rank if isinstance(found, Parts)]
    if len(parts) == len(by_rank):
        return rounding.error_ratios(parts)
    return [found for found in by_rank if isinstance(found, Errors)]


def _first(errors: Errors, rank: int, bound: float) -> list[Difference]:
    """The first of a rank's tensors whose error is too large, in the order of the model."""
    pairs = zip(errors.names, errors.errors, strict=True)
    wrong = ((name, error) for name, error in pairs if not error <= bound)
    return [Difference(errors.kind, name, rank, error) for name, error in wrong][:1]


def _uncovered(plan: Plan, findings: Sequence[Finding]) -> str:
    """The first tensor that the ranks did not compare exactly once, in any comparison."""
    kinds = {"gradients": "grad/", "weights": "model/", "optimizer": "optim/"}
    seen = set()
    for by_rank in zip(*(finding.pieces for finding in findings), strict=True):
        if by_rank in seen:
            continue
        seen.add(by_rank)
        begins = kinds[by_rank[0][0]]
        whole = {name: shape for name, shape in findings[0].whole if name.startswith(begins)}
        problem = uncovered(plan, whole, [pieces for _, pieces in by_rank])
        if problem:
            return problem
    return ""


def show(found: Report, console: Console) -> None:
    """The report as two tables, and whether the plan holds."""
    errors = Table("", "error", "bound", "", title=f"{found.plan} on {found.model}")
    times = " x alone" if found.bound == rounding.MOST else ""
    table = Table("bytes of one rank", *COLUMNS.values(), "")
    part = ""
    for row in found.rows:
        if row.part == "parity":
            cells = f"{row.values['error']:.1e}{times}", f"<= {found.bound:g}{times}"
            errors.add_row(row.name, *cells, _mark(row.holds))
            continue
        if part != row.part:
            table.add_section()
        part = row.part
        cells = [f"{row.values[key]:,}" if key in row.values else "" for key in COLUMNS]
        table.add_row(f"{part}: {row.name}", *cells, _mark(row.holds))
    console.print(errors)
    table.add_section()
    _show_step(found, table)
    console.print(table)
    first = found.first_difference
    if first is not None:
        console.print(
            f"The first that differs: {first.kind}, {first.name}, on rank {first.rank}; "
            f"error {first.error:.1e}{times}"
        )
    if found.strays:
        console.print(f"Memory: {found.strays}.")
    if found.uncovered:
        console.print(f"Not every element was compared. {found.uncovered}")
    console.print("It holds." if found.holds else "It does not hold.")
    for note in found.notes:
        console.print(note)


def _show_step(found: Report, table: Table) -> None:
    """What is held within a step; theory may bound the peak."""
    if found.activations:  # not under ep
        cells = f"{found.activations:,}", "", ""
        table.add_row("held in a step: activations", *cells, "not measured")
    if found.peak_read:
        same = found.peak_read == found.peak_bytes
        cells = f"{found.peak_bytes:,}", "", f"{found.peak_read:,}"
        table.add_row("held in a step: peak", *cells, "=" if same else "at most")


def _mark(good: bool) -> str:
    return "=" if good else "differs"
