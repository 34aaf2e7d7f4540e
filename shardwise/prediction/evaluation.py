"""The bytes that a rank sends when the engine evaluates a batch: one forward pass, in eval mode.

    check      the buffers, from the first rank of each data axis; the loss, over the stages; then
               the loss, the tokens and three numbers of the batch's lists, over the data ranks
    forward    parameters are gathered for each use; activations cross tensor and pipeline ranks,
               and the ranks of layers with a mesh of their own; tokens go to their experts

Nothing is recomputed, kept for a backward pass, reduced or updated.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from shardwise.core.layout import R, S
from shardwise.core.model_spec import ModelSpec
from shardwise.core.moves import price
from shardwise.core.plan import Plan
from shardwise.core.plan_schedule import schedule_of
from shardwise.prediction.group import groups
from shardwise.prediction.memory import OptimizerShape
from shardwise.prediction.rank_shape import shape_on
from shardwise.prediction.traffic import (
    CONSENSUS_BYTES,
    PIPELINE,
    Line,
    Tariff,
    carry_row,
    row_bytes,
    tensor_bytes,
)
from shardwise.techniques.expert.moves import Loads
from shardwise.techniques.expert.price import expert_bytes
from shardwise.techniques.offload.price_disk import moved_bytes

#: The loss, the tokens, and the lengths of lists and whether they matter (engine.py).
EVALUATED_NUMBERS = 5


def evaluation_bytes(
    plan: Plan,
    spec: ModelSpec,
    rank: int,
    optimizer: OptimizerShape,
    loads: Sequence[Loads] = (),
) -> dict[Line, int]:
    """The bytes `rank` sends to evaluate the batch of `spec`, in an engine without pending updates.

    The batch is one microbatch of the spec.

    `loads` are those of the experts in the whole batch; without them experts have an even load.
    """
    tariff, model = Tariff(plan, rank), shape_on(spec, plan, rank, trains=False)
    once = replace(plan, accumulate=1)
    units = Tariff(once, rank)
    for group in groups(plan, model):
        carry_row(units, group)
    _send(tariff, spec)
    tariff.broadcast(sum(buffer.stored_bytes for buffer in model.buffers), "check")
    tariff.agree(EVALUATED_NUMBERS, CONSENSUS_BYTES)
    tariff.move(PIPELINE, S(0), R, tariff.size(PIPELINE), CONSENSUS_BYTES, "check")
    if len(plan.tensor_degrees) > 1:  # the rows of all ranks
        step = price(S(0), R, plan.size, plan.size)
        tariff.add(Line("world", step.what, "check"), round(step.sent) * CONSENSUS_BYTES)
    found = dict(tariff.sent_bytes)
    others = (
        tensor_bytes(plan, spec, rank),
        row_bytes(plan, spec, rank),
        expert_bytes(plan, spec, rank, loads, trains=False),
        units.sent_bytes,
        moved_bytes(once, model, optimizer, rank),
    )
    for line, sent_bytes in (pair for lines in others for pair in lines.items()):
        if line.phase == "forward":
            found[line] = found.get(line, 0) + sent_bytes
    return found


def _send(tariff: Tariff, spec: ModelSpec) -> None:
    """What goes from each stage of this rank to a following one on another."""
    schedule, here = schedule_of(tariff.plan), tariff.coordinates.get(PIPELINE, 0)
    if schedule is None or spec.stages is None:
        return
    bundles = spec.stages.bundles[0]
    for bundle, (owner, following) in zip(bundles, pairwise(schedule.home), strict=True):
        for x in bundle if owner == here != following else ():
            tariff.send(x.element_bytes, x.numel, "forward")
