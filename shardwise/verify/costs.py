"""The bytes that a rank sends in its steps, counted and predicted from the plain model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwise.comm.ledger import Key, Tally
from shardwise.engine.engine import Engine
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.traffic import TrafficLine, by_kind
from shardwise.techniques.expert.expert_moves import Loads
from shardwise.techniques.expert.price import EVEN

#: The prediction for a step on this rank's share of a batch, perhaps with the rows of all ranks.
Theory = Callable[..., Prediction]
#: The note on layers of experts.
LOADS = (
    "the predicted bytes on the axis ep are computed from the routing of tokens by one process, on "
    "the same batches"
)


@dataclass(frozen=True)
class Costs:
    """The bytes of one step, by axis and kind: of the first step that differs, else of the last.

    `hold`: in every step so far, each line of the ledger equals its prediction, in each phase.
    `peaks` has by name a bound on the most bytes of a step, and the measured most
    (memory_proof.py). `notes` name parts of the prediction that depend on values.
    """

    theory: dict[str, int] = field(default_factory=dict[str, int])
    counted: dict[str, int] = field(default_factory=dict[str, int])
    hold: bool = True
    notes: tuple[str, ...] = ()
    peaks: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def after(
        self,
        engine: Engine,
        prediction: Prediction,
        *,
        flushed: bool = False,
        skipped: int = 0,
        loads: Sequence[Loads] = (),
    ) -> "Costs":
        """With the last step of `engine`. `flushed`: a delayed update was finished before that
        step, as by an evaluation. `skipped` earlier steps were skipped, the last right before it.
        """
        if not self.hold:
            return self
        counted = {
            TrafficLine(*key): t.sent_bytes for key, t in engine.last.items() if t.sent_bytes
        }
        done = engine.steps - engine.steps_run
        before = {"flushed": flushed, "done": done, "skipped": skipped}
        theory = prediction.in_step(engine.steps_run - 1, **before, loads=loads)
        notes = tuple(LOADS if note == EVEN else note for note in prediction.notes)
        between = prediction.exchanged(loads) if _short(prediction) else {}
        notes += tuple(
            f"{name}: {by_kind(counted).get(name, 0):,} bytes counted, "
            f"{by_kind(theory).get(name, 0):,} by the loads of one process, {least:,} to {most:,} "
            "possible. In 16 bits the two may round the scores of a token differently"
            for name, (least, most) in between.items()
        )
        same = all(a <= by_kind(counted).get(name, 0) <= b for name, (a, b) in between.items())
        theory, counted = (_without(lines, between) for lines in (theory, counted))
        same = same and theory == counted
        return Costs(by_kind(theory), by_kind(counted), same, notes)

    def of_evaluation(
        self, sent: Mapping[Key, Tally], prediction: Prediction, loads: Sequence[Loads]
    ) -> "Costs":
        """These costs if an evaluation `sent` what is predicted, else the evaluation's."""
        counted = {TrafficLine(*key): t.sent_bytes for key, t in sent.items() if t.sent_bytes}
        theory = prediction.in_evaluation(loads)
        open_lines = prediction.bytes_between if _short(prediction) else {}
        theory, counted = (_without(lines, open_lines) for lines in (theory, counted))
        if not self.hold or theory == counted:
            return self
        return replace(self, theory=by_kind(theory), counted=by_kind(counted), hold=False)


def _short(prediction: Prediction) -> bool:
    return prediction.plan.precision in ("bf16", "fp16")


def _without(lines: dict[TrafficLine, int], names: Collection[str]) -> dict[TrafficLine, int]:
    return {line: n for line, n in lines.items() if f"{line.axis} {line.kind}" not in names}
