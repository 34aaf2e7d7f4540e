"""The answer to a read of an activation: the first microbatch runs up to it, on real tensors.

    x.mean() > 0        after blocks.2, in stage 1

    rank of stage 0     F ----> bundle
    rank of stage 1              F until the read ----> its answer to all ranks
    rank of stage 2                                     goes on with the trace

A trace on meta (tracer.py) has shapes and no numbers. All ranks of the pipeline trace the same
microbatch, so they come to the same read together. The trace keeps the answer, and in each later
microbatch the rank that computes the tensor compares its own (stage.py).

One read costs one forward of the stages before it, once for each shape of microbatch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.move import begin_receive, begin_send, broadcast_object
from shardwise.comm.unchanged import kept_buffers
from shardwise.techniques.pipeline.stage import Asked, Unanswered
from shardwise.techniques.pipeline.stage_io import StageTrace
from shardwise.techniques.pipeline.stage_module import Staging
from shardwise.techniques.pipeline.stage_work import Microbatch


@dataclass(frozen=True)
class ActivationProbe:
    """Runs `call`, the forward of a microbatch, with the units of an action in `around`."""

    staging: Staging
    call: Callable[[nn.Module], Any]
    around: Callable[[str, int, Microbatch], AbstractContextManager[None]]

    def __call__(self, trace: StageTrace) -> Any:
        """The answer to the last event of `trace`, on every rank; all ranks of the axis call it."""
        schedule, axis = self.staging.schedule, self.staging.axis
        last, answer = len(trace.written) - 1, None
        if schedule.home[last] != axis.rank and not axis.transport.answered:
            raise Unanswered
        passed: list[Tensor] = []
        with torch.no_grad(), kept_buffers(self.staging.stages.layers.model):
            for stage in range(last + 1):
                self._arrive(stage, trace, passed)
                if schedule.home[stage] == axis.rank:
                    passed, answer = self._run(stage, trace, passed)
        return broadcast_object(answer, axis, schedule.home[last], self.staging.stages.device)

    def _run(
        self, stage: int, trace: StageTrace, received: list[Tensor]
    ) -> tuple[list[Tensor], Any]:
        stages = self.staging.stages
        try:
            with self.around("F", stage, Microbatch(0, None, trace=trace)):
                return stages.run(stage, trace, received, self.call).outputs, None
        except Asked as asked:
            return [], asked.answer

    def _arrive(self, stage: int, trace: StageTrace, passed: list[Tensor]) -> None:
        """Move the bundle in front of `stage` to its rank, into `passed`."""
        axis, home = self.staging.axis, self.staging.schedule.home
        if not stage or home[stage - 1] == home[stage]:
            return
        if axis.rank == home[stage - 1]:
            for x in passed:
                begin_send(x, axis, home[stage]).wait()
        elif axis.rank == home[stage]:
            device = self.staging.stages.device
            passed[:] = [
                torch.empty(spec.shape, dtype=spec.dtype, device=device)
                for spec in trace.bundles[stage - 1]
            ]
            for x in passed:
                begin_receive(x, axis, home[stage - 1]).wait()
