"""The bytes that a rank sends in its steps: counted, of a dry run, and by the closed forms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwise.core.mesh import EXPERTS
from shardwise.core.tally import TIER, Key, by_kind, sent_bytes
from shardwise.engine.engine import Engine
from shardwise.techniques.expert.apply import layers_of
from shardwise.techniques.expert.expert_moves import Loads
from shardwise.verify.oracles import textbook
from shardwise.verify.oracles.textbook import Uses

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
    ) -> "Costs":
        """With the last step of `engine`, whose dry run sends `theory`. `uses`: of the weights in
        the model's forward; `loads`: of its experts in each microbatch; `note`: of the dry run.
        """
        found = self._compared(engine, sent_bytes(engine.last), theory, uses, loads, trains=True)
        notes = note, LOADS if engine.plan.ep > 1 else ""
        return replace(found, notes=tuple(filter(None, notes))) if self.hold else self

    def of_evaluation(
        self, engine: Engine, sent: Lines, theory: Lines, uses: Uses | None, loads: Sequence[Loads]
    ) -> "Costs":
        """These costs if an evaluation `sent` what is predicted, else the evaluation's."""
        found = self._compared(engine, sent, theory, uses, loads, trains=False)
        return found if self.hold and not found.hold else self

    def _compared(
        self,
        engine: Engine,
        counted: Lines,
        theory: Lines,
        uses: Uses | None,
        loads: Sequence[Loads],
        *,
        trains: bool,
    ) -> "Costs":
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
        return replace(self, theory=kinds[0], counted=kinds[1], hold=hold)


def _depends(engine: Engine, line: Key) -> bool:
    """Whether the line depends on the routing of tokens, or on those of other ranks."""
    gates = {layer.gate.name for layer in layers_of(engine.model).values()}
    if "expert-choice" in gates and line.kind == "all_gather":
        return True
    copied = engine.plan.activations_on_host and line.axis == TIER and line.phase != "update"
    return engine.plan.ep > 1 and (copied or line[:2] == (EXPERTS, "all_to_all"))
