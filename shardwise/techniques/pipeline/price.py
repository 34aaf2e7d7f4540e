"""The bytes of a pipeline: what a rank sends to other stages, and the versions of weights it keeps.

In a step the schedule's transfers are sent: values cross boundaries forward, and the gradients of
trained ones cross backward; then the buffers outside of layers that a run has written.

An asynchronous schedule keeps old versions of trained parameters, at the peak of the step
(core/schedule/lower.py). There are none between steps.
"""

from collections.abc import Mapping
from itertools import product
from typing import Final

from shardwise.comm.ledger import Key
from shardwise.core.mesh import PIPELINE as AXIS
from shardwise.core.plan.plan_check import schedule_of
from shardwise.core.schedule.library import build, updates
from shardwise.core.schedule.lower import versions
from shardwise.core.schedule.schedule import Transfer
from shardwise.core.zero import Tier
from shardwise.prediction.stored_bytes import block_bytes, groups
from shardwise.prediction.traffic import Counted, Price, Share, Tariff


def _sends(share: Share) -> Counted:
    tariff, schedule = Tariff(share.plan, share.rank), schedule_of(share.plan)
    bundles = share.spec.stages.bundles if share.spec.stages else ()
    if schedule is None or not bundles:
        return tariff.sent_bytes
    here = tariff.coordinates.get(AXIS, 0)
    steps = schedule.rows[here]
    sends = [step.token for step in steps if isinstance(step, Transfer) and step.op == "SEND"]
    runs = range(0, len(bundles), schedule.microbatches)
    assert share.spec.stages is not None
    others = len(runs) * (len(schedule.rows) - 1)
    for stage, stored_bytes in share.spec.stages.written:
        if schedule.home[stage] == here:
            tariff.add(Key(AXIS, "broadcast", "check"), stored_bytes * others)
    for first, (kind, stage, microbatch) in product(runs, sends):
        forward = kind == "act"
        for x in bundles[first + microbatch][stage if forward else stage - 1]:
            times = int(forward or x.trained)
            tariff.send(x.element_bytes, times * x.numel, "forward" if forward else "backward")
    return tariff.sent_bytes


def _stores(share: Share, tier: Tier) -> Mapping[str, int]:
    plan, stages = share.plan, share.plan.mesh.size_of(AXIS)
    if tier != "device" or not updates(plan.pipeline, stages):
        return {}
    schedule = build(plan.pipeline or "", stages)
    here = plan.coordinate(share.rank).get(AXIS, 0)
    own = [versions(schedule)[stage] - 1 for stage in schedule.stages(here)]
    trained = (group for group in groups(plan, share.model) if group.trained)
    return {"versions": sum(own) * sum(block_bytes(group, sharded=False) for group in trained)}


PIPELINE: Final = Price(_sends, _stores)
