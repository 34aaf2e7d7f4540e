"""A step without a pipeline: the schedule of one stage, whose microbatches accumulate
(stage_work.py).

    F0.0  B0.0  F0.1  B0.1  ...  REDUCE:0      hooks gather, free and reduce units meanwhile
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.unchanged import eval_mode
from shardwise.comm.world import Axis
from shardwise.core.applied import Applied, during
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.schedule import Action, Schedule
from shardwise.engine.optimizer.norm import LossWeights
from shardwise.techniques.data.rerun import Objective, Rerun
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.pipeline.runtime import Watch, run
from shardwise.techniques.pipeline.stage_work import Microbatch, ScaledLoss, StageWork, WholeModel


@lru_cache(maxsize=16)
def one_stage(microbatches: int) -> Schedule:
    row = [Action(op, 0, i) for i in range(microbatches) for op in ("F", "B")]
    return lower(Schedule((tuple(row),), (0,), microbatches))


class OneStage:
    """The full model as the only stage. `apart`: drop the gradients of a microbatch without tokens.
    False if experts of this rank compute tokens of other ranks.  `rerun_every`: as in Rerun.
    """

    trains = False  # not known before gradients arrive

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        applied: Sequence[Applied],
        objective: Objective,
        device: torch.device,
        *,
        apart: bool = True,
        rerun_every: int = 0,
    ) -> None:
        self.apart = apart
        self.rerun = Rerun(data, rerun_every, device)
        self.model, self.data, self.applied = model, data, applied
        self.objective, self.device = objective, device
        self.microbatches = 1
        self.watch: Watch | None = None

    def run(self, parts: Sequence[Any], counts: Sequence[float], weights: LossWeights) -> Tensor:
        """Run all microbatches forward and backward; the last one sums gradients over the ranks.
        `parts` are microbatches, `counts` their tokens.  Returns the double sum of loss * tokens.
        """

        def again(part: Any, tokens: float, objective: Objective) -> object:
            return self._run([part], [tokens], weights, objective, last=False)

        objective = self.rerun.begin(self.objective, parts[0], counts[0], again)
        return self._run(parts, counts, weights, objective)

    def _run(
        self,
        parts: Sequence[Any],
        counts: Sequence[float],
        weights: LossWeights,
        objective: Objective,
        *,
        last: bool = True,
    ) -> Tensor:
        pairs = enumerate(zip(parts, counts, strict=True))
        microbatches = [Microbatch(index, part, tokens) for index, (part, tokens) in pairs]
        loss = ScaledLoss(weights, self.device)
        count = len(parts) + (not last)
        units = OneStageUnits(self.data, self.applied, self.device, count, apart=self.apart)
        whole = WholeModel(self.model, self.device)
        work = StageWork(whole, units, loss, objective, microbatches)
        run(one_stage(len(parts)), Axis("none"), work, self.watch)
        return loss.summed

    def evaluate(self, call: Callable[[nn.Module], Tensor]) -> Tensor | None:
        """The result of `call(model)` in eval mode, without gradients."""
        self.data.begin_forward()
        with eval_mode(self.model), during(self.applied, self.device):
            found = call(self.model)
        self.data.end_evaluation()
        return found

    def require(self, *_: Any) -> None:
        """Do nothing: a microbatch may have no rows."""

    stale = None

    def updates_stages(self, *_: Any) -> bool:
        return False

    def shared(self, names: Sequence[str], used: Tensor) -> Tensor:
        """Which of the named parameters any rank used: the same ones as this rank."""
        return used

    def leave_out(self) -> bool:
        return False


class OneStageUnits:
    """The units of a model, gathered, freed and reduced by hooks on its modules and its root."""

    def __init__(
        self,
        data: Data,
        applied: Sequence[Applied],
        device: torch.device,
        microbatches: int,
        *,
        apart: bool,
    ) -> None:
        self.apart = apart
        self.data, self.applied, self.device = data, applied, device
        self.microbatches = microbatches

    @contextmanager
    def around(self, op: str, stage: int, microbatch: Microbatch) -> Iterator[None]:
        """Reduce gradients in the last B; drop gradients of a microbatch without tokens."""
        if op == "F":
            self.data.begin_forward()
        if op == "B":
            self.data.consensus.phase("backward")
            self.data.mute = self.apart and microbatch.tokens == 0
            self.data.sync = microbatch.index == self.microbatches - 1
        with during(self.applied, self.device):
            yield
        self.data.end_pass()

    def reduce(self, stage: int) -> None:
        """Do nothing: hooks began each reduction when the last backward completed its unit."""

    def update(self, stage: int, microbatches: Sequence[Microbatch]) -> None:
        raise AssertionError("The engine updates.")
