"""What a rank sends in its steps, as counted, beside the prediction from the plain model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardwise.engine.engine import Engine
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.traffic import Line, by_kind

#: The prediction for a step on this rank's share of a batch.
Theory = Callable[[Any], Prediction]
#: The note on layers of experts.
LOADS = "the bytes of experts are computed from the numbers of tokens that the run routed to each"


@dataclass(frozen=True)
class Costs:
    """The bytes of one step, by axis and kind: of the first that differs, else of the last.

    `hold`: in every step so far each line of the ledger, phases apart, was as predicted.
    `activations` are the predicted bytes that autograd keeps. `notes` name what the prediction
    cannot know because it depends on values.
    """

    theory: dict[str, int] = field(default_factory=dict[str, int])
    counted: dict[str, int] = field(default_factory=dict[str, int])
    hold: bool = True
    activations: int = 0
    notes: tuple[str, ...] = ()

    def after(self, engine: Engine, told: Prediction, *, loaded: bool = False) -> "Costs":
        """With the step that `engine` has just made; `loaded`: after it loaded a checkpoint."""
        if not self.hold:
            return self
        counted = {Line(*key): t.sent_bytes for key, t in engine.last.items() if t.sent_bytes}
        moves = engine.sharded.experts.moves
        theory = told.in_step(engine.steps_run - 1, loaded=loaded, moves=moves)
        notes = (*told.notes, LOADS) if moves else told.notes
        same = theory == counted
        return Costs(by_kind(theory), by_kind(counted), same, told.activations, notes)
