"""The results of a proof on one rank, as values that are sent to the reporting process."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardwise.core.mesh import EXPERTS
from shardwise.core.tally import TIER, Key, by_kind, sent_bytes
from shardwise.engine.engine import Engine
from shardwise.engine.state.box import Box
from shardwise.techniques.expert.apply import layers_of
from shardwise.verify.oracles import textbook
from shardwise.verify.oracles.batches import Loads
from shardwise.verify.oracles.textbook import Uses

if TYPE_CHECKING:
    pass

# --- the bytes that a rank sends: counted, of a dry run, and by the closed forms ------------------

#: The tokens that go to experts of other ranks, and back.
EXCHANGED = f"{EXPERTS} all_to_all"
#: The note on layers of experts.
LOADS = (
    "the predicted bytes on the axis ep are computed from the routing of tokens by one process, on "
    "the same batches"
)
#: By axis, kind and phase.
Lines = Mapping[Key, int]


@dataclass(frozen=True)
class Costs:
    """The bytes of one step, by axis and kind: of the first step that differs, else of the last.

    `hold`: in every step so far, each line of the ledger equals that of the dry run, in each phase,
    and no closed form differs. `peaks` has by name a bound on the most bytes of a step, and the
    measured most (memory_proof.py). `notes` name parts of the prediction that depend on values.
    """

    theory: dict[str, int] = field(default_factory=dict[str, int])
    counted: dict[str, int] = field(default_factory=dict[str, int])
    hold: bool = True
    notes: tuple[str, ...] = ()
    peaks: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def after(
        self,
        engine: Engine,
        theory: Lines,
        uses: Uses | None = None,
        loads: Sequence[Loads] = (),
        note: str = "",
        evaluated: Lines | None = None,
    ) -> "Costs":
        """With the last step of `engine`, whose dry run sends `theory`. `uses`: of the weights in
        the model's forward; `loads`: of its experts in each microbatch; `note`: of the dry run.
        With what an evaluation sent: these costs if that is predicted, else the evaluation's.
        """
        trains = evaluated is None
        counted = sent_bytes(engine.last) if evaluated is None else evaluated
        exact = {line: n for line, n in theory.items() if not _depends(engine, line)}
        read = {line: n for line, n in counted.items() if not _depends(engine, line)}
        kinds = [by_kind(exact), by_kind(read)]
        if uses and loads and engine.plan.ep > 1 and engine.plan.precision not in ("bf16", "fp16"):
            kinds[0][EXCHANGED] = textbook.exchanged(engine, uses, loads, trains=trains)
            kinds[1][EXCHANGED] = by_kind(counted).get(EXCHANGED, 0)
        hold = exact == read and kinds[0] == kinds[1]
        if uses is not None:
            broken = textbook.broken_bytes(engine, counted, uses, trains=trains)
            for name, (found, promised) in broken.items():
                hold, kinds[0][name], kinds[1][name] = False, promised, found
        if not self.hold or (hold and not trains):
            return self
        told = tuple(filter(None, (note, LOADS if engine.plan.ep > 1 else "")))
        notes = told if trains else self.notes
        return replace(self, theory=kinds[0], counted=kinds[1], hold=hold, notes=notes)


def _depends(engine: Engine, line: Key) -> bool:
    """Whether the line depends on the routing of tokens, or on those of other ranks."""
    gates = {layer.gate.name for layer in layers_of(engine.model).values()}
    if "expert-choice" in gates and line.kind == "all_gather":
        return True
    copied = engine.plan.activations_on_host and line.axis == TIER and line.phase != "update"
    return engine.plan.ep > 1 and (copied or line[:2] == (EXPERTS, "all_to_all"))


# --- results --------------------------------------------------------------------------------------

#: The error of a value that is not a number.
NEVER = 1e300


@dataclass(frozen=True)
class Errors:
    """The error of each tensor of a kind ("loss", "gradients", "weights", ...), in order."""

    kind: str
    names: tuple[str, ...]
    errors: tuple[float, ...]

    @classmethod
    def of_facts(cls, kind: str, facts: Mapping[str, bool]) -> "Errors":
        return cls(kind, tuple(facts), tuple(0.0 if holds else NEVER for holds in facts.values()))

    @property
    def largest(self) -> float:
        return max(self.errors, default=0.0)


@dataclass(frozen=True)
class Part:
    """A rank's part of a tensor in 16 bits: squares of errors against the exact values, summed.

    `parallel` is the parallel run's, `alone` is one process's in the same precision. `exact` is the
    sum of squares of the values, `along` the sum of error times value of the parallel run, `rounds`
    the unit roundoff of the precision. `independent` is about how many roundings determine `alone`
    (rounding.py). `drift` is the sum of error times value of `alone`, `drift_varies` its variance.
    """

    name: str
    elements: int
    parallel: float
    alone: float
    exact: float
    along: float
    rounds: float
    replica: int = 0
    independent: float = 1.0
    drift: float = 0.0
    drift_varies: float = 0.0


@dataclass(frozen=True)
class Parts:
    """A rank's parts of the tensors of a kind, in order; see rounding.py."""

    kind: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class BoxPlace:
    """The place of a rank's box in its tensor; one of the ranks that hold it has `replica` 0."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    replica: int

    @classmethod
    def of(cls, boxes: Iterable[Box]) -> frozenset["BoxPlace"]:
        return frozenset(cls(b.name, b.shape, b.offsets, b.sizes, b.replica) for b in boxes)


@dataclass(frozen=True)
class Finding:
    """The results of one rank: errors by kind; bytes sent and stored, predicted and measured.

    Gradients have errors for each step. `pieces` are the pieces of each comparison; `whole` has the
    shapes of the tensors that all ranks together must compare. `strays` describes live storages in
    no category of memory (memory_proof.py). `narrow`: a model with fp64 weights computes in fp32.
    `alone` are the losses of the steps by this rank's oracle.
    """

    rank: int
    errors: tuple[Errors | Parts, ...]
    costs: Costs
    memory_measured: dict[str, int]
    memory_predicted: dict[str, int]
    pieces: tuple[tuple[str, frozenset[BoxPlace]], ...] = ()
    whole: tuple[tuple[str, tuple[int, ...]], ...] = ()
    strays: str = ""
    narrow: bool = False
    alone: tuple[float, ...] = ()

    @property
    def memory_holds(self) -> bool:
        within = all(read <= most for most, read in self.costs.peaks.values())
        return within and self.memory_measured == self.memory_predicted

    def with_promises(self, broken: Mapping[str, tuple[int, int]]) -> "Finding":
        return replace(
            self,
            memory_measured=self.memory_measured | {n: read for n, (read, _) in broken.items()},
            memory_predicted=self.memory_predicted | {n: most for n, (_, most) in broken.items()},
        )


def renamed(found: Errors | Parts, kind: str) -> Errors | Parts:
    """The same errors under another kind, with the old kind in their names."""
    what = {"gradients": "gradient of ", "weights": "weight ", "optimizer": "optimizer "}
    before = what.get(found.kind, "")
    if isinstance(found, Errors):
        return Errors(kind, tuple(before + name for name in found.names), found.errors)
    return Parts(kind, tuple(replace(part, name=before + part.name) for part in found.parts))
