"""The report of a proof over all ranks, as a table or JSON.

Bounds: 1e-10 in fp64, 1e-5 in fp32 (difference.py); in 16 bits 1.5 (rounding.py). The ranks
together must compare each element of every tensor once in every replica:

    dp2 zero3       rank 0  [======    ]    rank 1  [      ====]      one replica, in two pieces
    dp2             rank 0  [==========]    rank 1  [==========]      two replicas

A rank that reported nothing would always pass. The number of replicas follows from the plan, or
from a layer's own: data ranks that do not shard have one each. Along the tensor axis a parameter is
either sharded over all ranks or replicated on each. 0-d tensors (an optimizer's step count) are
checked in replica 0 only.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shardwise.core.plan.plan import Plan
from shardwise.engine.state.box import block
from shardwise.verify.difference import KINDS
from shardwise.verify.finding import BoxPlace, Errors, Finding, Parts
from shardwise.verify.oracles import rounding

BOUNDS = {"fp64": 1e-10, "fp32": 1e-5, "bf16": rounding.MOST, "fp16": rounding.MOST}
#: The columns of the report, and the source of their numbers.
COLUMNS = {"theory": "theory", "counted": "counted", "read": "read from the system"}
WIDTH = 100  # of the report as text
#: A wrong gradient makes these wrong as well, so they are named last.
LATE = ("loss", "evaluation", "outputs", "after loading")

#: Said of a proof in fp64 in which something is rounded to fp32.
NARROW = (
    "The model or its loss computes in fp32 (.float()), so the bound is that of fp32. Without it "
    "the bound is 1e-10."
)

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
    """A line of a report. `part`: "parity" with "error" and "bound", or "sent" or "held" with bytes
    of one rank by source, "theory" and "counted" or "read".
    """

    part: str
    name: str
    values: dict[str, float]
    holds: bool


@dataclass(frozen=True)
class Report:
    """The results of all ranks. `bound` is that of the errors.

    Bytes and memory are of the first rank whose numbers disagree with theory, or of rank 0.
    `uncovered` names a tensor that the ranks together do not compare exactly once, or is empty.
    `note` says why the model cannot match one process, and `changed` what the proof changed in it
    (inputs.py); both may be empty. `strays` lists that rank's storages in no category
    (memory_proof.py). `in_step` are the most bytes at a moment of a step, at most those of theory.
    `depends` names the parts of the prediction that depend on values.
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
    depends: tuple[str, ...] = ()
    in_step: Columns = field(default_factory=dict[str, dict[str, int]])
    bound: float = 0.0

    @property
    def rows(self) -> list[ReportRow]:
        """The lines of the table."""
        found = [
            ReportRow("parity", kind, {"error": error, "bound": self.bound}, error <= self.bound)
            for kind, error in self.parity.items()
        ]
        for part, columns in (("sent", self.sent), ("held", self.memory)):
            for name in dict.fromkeys(name for column in columns.values() for name in column):
                values = {key: float(column.get(name, 0)) for key, column in columns.items()}
                found.append(ReportRow(part, name, values, len(set(values.values())) == 1))
        for name, most in self.in_step.get("theory", {}).items():
            read = self.in_step["read"][name]
            values = {"theory": float(most), "read": float(read)}
            found.append(ReportRow("held in a step", name, values, read <= most))
        return found

    def __str__(self) -> str:
        text = StringIO()
        show(self, Console(file=text, width=WIDTH, emoji=False, markup=False))
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    @property
    def notes(self) -> list[str]:
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
            "in_step": self.in_step,
            "first_difference": first and vars(first),
            "uncovered": self.uncovered,
            "strays": self.strays,
            "columns": COLUMNS,
        }
        return json.dumps(found)


def report(plan: Plan, model: str, findings: Sequence[Finding]) -> Report:
    """Combine the ranks' results, and name a rank whose results differ."""
    bound = BOUNDS[plan.precision or "fp64"]
    differences = _differences(findings, bound)
    narrow = bool(differences) and any(finding.narrow for finding in findings)
    if narrow and plan.precision == "fp64":
        bound = BOUNDS["fp32"]
        differences = _differences(findings, bound)
    parity: dict[str, float] = {}
    for by_rank in zip(*(finding.errors for finding in findings), strict=True):  # one kind each
        compared = _errors_of(by_rank)
        kind, largest = compared[0].kind, max(errors.largest for errors in compared)
        parity[kind] = max(parity.get(kind, 0.0), largest)
    bytes_off = [f for f in findings if not f.costs.hold]
    memory_off = [f for f in findings if not f.memory_holds]
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
        changed=NARROW if bound == BOUNDS["fp32"] and plan.precision == "fp64" else "",
        depends=sent.costs.notes,
        bound=bound,
        in_step={
            "theory": {name: most for name, (most, _) in held.costs.peaks.items()},
            "read": {name: read for name, (_, read) in held.costs.peaks.items()},
        },
    )


def may_be_chance(found: Report, findings: Sequence[Finding]) -> bool:
    """Whether all that differs are errors in 16 bits, whose ratios vary from batch to batch."""
    if found.bound != rounding.MOST or not found.first_difference or found.uncovered:
        return False
    facts = [e for one in findings for e in one.errors if isinstance(e, Errors)]
    costs = all(one.costs.hold and one.memory_holds for one in findings)
    return costs and all(errors.largest <= found.bound for errors in facts)


def over_batches(batches: Sequence[Sequence[Finding]]) -> list[Finding]:
    """One finding for each rank: the costs of the first batch, the mean errors of all batches."""
    every = [
        [_errors_of(by_rank) for by_rank in zip(*(one.errors for one in findings), strict=True)]
        for findings in batches
    ]
    kinds = [
        [_mean(of) for of in zip(*by_batch, strict=True)] for by_batch in zip(*every, strict=True)
    ]
    return [
        replace(finding, errors=tuple(errors))
        for finding, errors in zip(batches[0], zip(*kinds, strict=True), strict=True)
    ]


def _mean(of_batches: Sequence[Errors]) -> Errors:
    """The geometric mean of each error over the batches, since its logarithm varies by chance
    (rounding.py). An error below 1 counts as 1, so that it does not hide a large one in another.
    """
    errors = [
        math.exp(fmean(math.log(max(error, 1.0)) for error in of_one)) if any(of_one) else 0.0
        for of_one in zip(*(one.errors for one in of_batches), strict=True)
    ]
    return replace(of_batches[0], errors=tuple(errors))


def _differences(findings: Sequence[Finding], bound: float) -> list[Difference]:
    """The first tensor of each kind and rank that differs; kinds that others change come last."""
    found: list[Difference] = []
    for by_rank in zip(*(finding.errors for finding in findings), strict=True):
        for errors, finding in zip(_errors_of(by_rank), findings, strict=True):
            found += _first(errors, finding.rank, bound)
    return sorted(found, key=lambda difference: difference.kind in LATE)


def _errors_of(by_rank: Sequence[Errors | Parts]) -> list[Errors]:
    parts = [found for found in by_rank if isinstance(found, Parts)]
    if len(parts) == len(by_rank):
        return rounding.error_ratios(parts)
    return [found for found in by_rank if isinstance(found, Errors)]


def _first(errors: Errors, rank: int, bound: float) -> list[Difference]:
    pairs = zip(errors.names, errors.errors, strict=True)
    wrong = ((name, error) for name, error in pairs if not error <= bound)
    return [Difference(errors.kind, name, rank, error) for name, error in wrong][:1]


def _uncovered(plan: Plan, findings: Sequence[Finding]) -> str:
    """The first tensor that the ranks did not compare exactly once, in any comparison."""
    seen = set()
    for by_rank in zip(*(finding.pieces for finding in findings), strict=True):
        if by_rank in seen:
            continue
        seen.add(by_rank)
        begins = KINDS[by_rank[0][0]]
        whole = {name: shape for name, shape in findings[0].whole if name.startswith(begins)}
        problem = uncovered(plan, whole, [pieces for _, pieces in by_rank])
        if problem:
            return problem
    return ""


def show(found: Report, console: Console) -> None:
    """Print the report as two tables, and whether the plan holds."""
    errors = Table("", "error", "bound", "", title=f"{found.plan} on {found.model}")
    times = " x alone" if found.bound == rounding.MOST else ""
    table = Table("bytes of one rank", *COLUMNS.values(), "")
    part = ""
    for row in found.rows:
        if row.part == "parity":
            error = said_of(row.values["error"], found.bound)
            errors.add_row(row.name, error + times, f"<= {found.bound:g}{times}", _mark(row))
            continue
        if part != row.part:
            table.add_section()
        part = row.part
        cells = [f"{row.values[key]:,.0f}" if key in row.values else "" for key in COLUMNS]
        table.add_row(f"{part}: {row.name}", *cells, _mark(row))
    console.print(errors)
    console.print(table)
    first = found.first_difference
    if first is not None:
        console.print(
            f"The first that differs: {first.kind}, {first.name}, on rank {first.rank}; "
            f"error {said_of(first.error, found.bound)}{times}"
        )
    if found.strays:
        console.print(f"Memory: {found.strays}.")
    if found.uncovered:
        console.print(f"Not every element was compared. {found.uncovered}")
    console.print("It holds." if found.holds else "It does not hold.")
    for note in found.notes:
        console.print(note)


def said_of(error: float, bound: float) -> str:
    """An error with enough digits to tell it from its bound."""
    form = "g" if bound == rounding.MOST else "e"
    texts = [f"{error:.{digits}{form}}" for digits in (2, 4, 6, 9, 17)]
    return next((text for text in texts if float(text) != bound), texts[0])


def _mark(row: ReportRow) -> str:
    if not row.holds:
        return "differs"
    return "=" if row.part == "parity" or len(set(row.values.values())) == 1 else "at most"


# --- coverage -------------------------------------------------------------------------------------

#: The coordinates of a rank: of its data replica, on the tensor axis, on the pipeline axis.
Place = tuple[tuple[int, ...], int, int]


def uncovered(
    plan: Plan, whole: Mapping[str, tuple[int, ...]], by_rank: Sequence[Iterable[BoxPlace]]
) -> str:
    """The error of the first tensor in `whole` that the pieces do not cover, or ""."""
    plans = plan.of_all_layers
    places = [[_place(own, rank) for rank in range(len(by_rank))] for own in plans]
    found: dict[str, list[tuple[int, BoxPlace]]] = defaultdict(list)
    for rank, pieces in enumerate(by_rank):
        for piece in pieces:
            found[piece.name].append((rank, piece))
    for name, shape in whole.items():
        number = plan.layer_of(name.rpartition("/")[2])
        problem = _problem(shape, found[name], places[number])
        if problem:
            return f"{name}: {problem}"
    return ""


def _place(plan: Plan, rank: int) -> Place:
    here = plan.coordinate(rank)
    if plan.shard_axis is None:  # the ranks of an ep group have the experts of one replica
        here["dp"] = here["edp"]
    data = [axis for axis in ("dp", "dp_replicate", "dp_shard") if axis != plan.shard_axis]
    return tuple(here.get(axis, 0) for axis in data), here.get("tp", 0), here.get("pp", 0)


def _problem(
    shape: tuple[int, ...], shown: Sequence[tuple[int, BoxPlace]], places: Sequence[Place]
) -> str:
    for _, piece in shown:
        ends = [o + s for o, s in zip(piece.offsets, piece.sizes, strict=True)]
        if piece.shape != shape or any(map(int.__gt__, ends, shape)):
            return f"a piece of a tensor of shape {list(piece.shape)}, which has {list(shape)}"
    first = _counted(shape, [piece for _, piece in shown if piece.replica == 0])
    if (first != 1).any():
        return _said(first, "in replica 0")
    if not shape:
        return ""
    # each rank of the shard axis may hold a full tensor (a frozen parameter), as a replica
    replicas: dict[tuple[Place, int], list[BoxPlace]] = defaultdict(list)
    own: dict[int, list[BoxPlace]] = defaultdict(list)
    for rank, piece in shown:
        replicas[places[rank], piece.replica].append(piece)
        own[rank].append(piece)
    counts = [(place, _counted(shape, pieces)) for (place, _), pieces in replicas.items()]
    counts += [(places[rank], _counted(shape, pieces)) for rank, pieces in own.items()]
    masks: dict[Place, Tensor] = {}
    for place, count in counts:
        if (count > 1).any():
            return _said(count, f"on the ranks of {_named(place)}")
        masks[place] = masks.get(place, count > 0) | (count > 0)
    return _unlike(masks, places)


def _unlike(masks: Mapping[Place, Tensor], places: Sequence[Place]) -> str:
    """A data replica that lacks an element, or a tensor rank of an unsharded tensor; "" if none."""
    tensor_ranks = sorted({tp for _, tp, _ in places})
    for data in sorted({data for data, _, _ in places}):
        held = {
            tp: [mask for (d, t, _), mask in masks.items() if (d, t) == (data, tp)]
            for tp in tensor_ranks
        }
        any_of = {tp: torch.stack(of).any(0) for tp, of in held.items() if of}
        if not any_of or not torch.stack(list(any_of.values())).any(0).all():
            return f"data replica {list(data)} does not compare all of it"
        full = [tp for tp in tensor_ranks if tp in any_of and any_of[tp].all()]
        if full and len(full) < len(tensor_ranks):
            lacks = next(tp for tp in tensor_ranks if tp not in full)
            return f"tensor rank {full[0]} compares all of it, and tensor rank {lacks} does not"
    return ""


def _counted(shape: tuple[int, ...], pieces: Iterable[BoxPlace]) -> Tensor:
    count = torch.zeros(shape, dtype=torch.int16)
    for piece in pieces:
        block(count, piece.offsets, piece.sizes).add_(1)
    return count


def _said(count: Tensor, where: str) -> str:
    missing, twice = int((count == 0).sum()), int((count > 1).sum())
    return f"{missing} elements are compared by no rank and {twice} more than once {where}"


def _named(place: Place) -> str:
    data, tp, pp = place
    return f"data replica {list(data)}, tensor rank {tp}, pipeline rank {pp}"
