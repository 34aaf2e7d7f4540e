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
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.comm.move import broadcast_object
from shardwise.comm.unchanged import kept_buffers
from shardwise.techniques.pipeline.runtime import forward_only, run
from shardwise.techniques.pipeline.stage import Asked, Unanswered
from shardwise.techniques.pipeline.stage_io import StageTrace
from shardwise.techniques.pipeline.stage_module import Staging
from shardwise.techniques.pipeline.stage_work import Microbatch, Result, StageUnits, StageWork


@dataclass(frozen=True)
class ActivationProbe:
    """Runs `call`, the forward of a microbatch, in the stages up to the read."""

    staging: Staging
    call: Callable[[nn.Module], Any]
    units: StageUnits

    def __call__(self, trace: StageTrace) -> Any:
        """The answer to the last event of `trace`, on every rank; all ranks of the axis call it."""
        schedule, axis, stages = self.staging.schedule, self.staging.axis, self.staging.stages
        count, answer = len(trace.written), None
        home = schedule.home[count - 1]
        if home != axis.rank and not axis.transport.answered:
            raise Unanswered
        part = Microbatch(0, None, trace=trace)
        of = stages, self.units, Result(), lambda model, *_: self.call(model), [part]
        try:
            with torch.no_grad(), kept_buffers(stages.layers.model):
                run(forward_only(schedule, count), axis, StageWork(*of, trains=False))
        except Asked as asked:
            answer = asked.answer
        return broadcast_object(answer, axis, home, stages.device)
