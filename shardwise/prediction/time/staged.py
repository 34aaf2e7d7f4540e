"""The streams of a pipeline rank: the clock of the schedule, with the seconds of each stage.

    F, B       kernels of the stage's layers, and the collectives within them; I and W half of B
    gathers    of sharded weights: what the acts of this rank expose, the same for each stage
    hop        the message from one stage to the next, which overlaps with computation
    REDUCE     sums of a stage's gradients, on a stream of their own, from its last B or W

All ranks meet after the last sum, so the step is as long as that of the slowest rank.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Final, NamedTuple

from shardwise.core.mesh import PIPELINE
from shardwise.core.plan.plan_check import schedule_of
from shardwise.core.schedule.clock import ActionCosts, Timeline, clock
from shardwise.core.schedule.schedule import Action
from shardwise.core.tally import Key, Tally
from shardwise.prediction.rank_shape import parts_on, stage_of
from shardwise.prediction.time.step_time import RankWork, seconds_by
from shardwise.prediction.time.streams import Streams, TimedActs
from shardwise.prediction.unit_acts import StageActs

#: The part of a backward pass that an action does.
SHARES: Final = {"F": 1.0, "B": 1.0, "I": 0.5, "W": 0.5}
#: The pass of the model that an action belongs to.
PHASES: Final = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


#: Seconds by op ("F", "B", "I", "W") and stage.
StageSeconds = Mapping[str, Sequence[float]]


class StageKernels(NamedTuple):
    """The seconds of each stage of a rank's pipeline, without waits for gathers.

    kernels   by phase and stage
    inline    by phase and axis, the mean of a stage
    seconds   by op and stage: both
    """

    kernels: Mapping[str, Mapping[int, float]]
    inline: Mapping[str, Mapping[str, float]]
    seconds: StageSeconds


def stage_kernels(work: RankWork) -> StageKernels:
    """The seconds of each stage: of its kernels, and of collectives within its layers."""
    found, spec = work.found, work.found.spec
    schedule, stages = schedule_of(found.plan), spec.stages
    assert schedule is not None and stages is not None
    here = found.plan.mesh.coordinate(found.rank).get(PIPELINE, 0)
    kernels = seconds_by(work.operations, work.cluster, cache(partial(stage_of, spec)))
    own = len(schedule.stages(here))
    inline = {
        phase: {axis: seconds / own for axis, seconds in axes.items()}
        for phase, axes in work.inline.items()
    }
    seconds = {
        op: tuple(
            SHARES[op] * (kernels[phase][stage] + sum(inline[phase].values()))
            for stage in range(stages.number)
        )
        for op, phase in PHASES.items()
    }
    return StageKernels(kernels, inline, seconds)


def staged_streams(work: RankWork, ahead: int) -> tuple[Streams, float]:
    """The streams of a rank at the end of a step, and the seconds of its bubble."""
    found, (kernels, inline, least) = work.found, stage_kernels(work)
    schedule = schedule_of(found.plan)
    assert schedule is not None
    here, runs = found.plan.mesh.coordinate(found.rank).get(PIPELINE, 0), found.plan.accumulate
    exposed = _exposed(work, ahead)
    seconds = {
        op: tuple(s + sum(exposed.get(op, {}).values()) for s in stages)
        for op, stages in least.items()
    }
    timeline = clock(schedule, ActionCosts(**seconds, hop=hop_s(work)))
    streams = Streams()
    for action in [span.action for span in timeline.spans[here]] * runs:
        if action.op in SHARES:
            phase = PHASES[action.op]
            streams.compute(SHARES[action.op] * kernels[phase][action.stage])
            streams.exchange({a: SHARES[action.op] * s for a, s in inline[phase].items()})
            streams.exchange(exposed.get(action.op, {}))
    bubble_s = runs * timeline.makespan - streams.now
    for axis, late_s in _late(work, timeline).items():
        streams.exchange({axis: late_s})
    return streams, bubble_s


def _exposed(work: RankWork, ahead: int) -> Mapping[str, Mapping[str, float]]:
    """The mean time for which an action of this rank waits for gathers, by op and axis."""
    found = work.found
    if not any(group.moves.reshards for unit in work.groups for group in unit):
        return {}
    own = [unit for unit in work.groups if unit]
    staged = StageActs(
        found.plan, parts_on(found.spec, found.plan, found.rank), found.rank, ahead, own
    )
    units = work.units()
    if any(action.op == "I" for action in staged.actions):
        units = [each._replace(compute=_halved(each.compute)) for each in units]
    timed = TimedActs(staged.acts, units, work.cluster.device.overlap)
    deque(staged.run(), 0)  # the first run learns the order of units
    timed.restart()
    waited = {op: defaultdict[str, float](float) for op in SHARES}
    times = Counter(action.op for action in staged.actions)
    for action in staged.run():
        for axis, seconds in timed.streams.waited_s.items() if action.op in SHARES else ():
            waited[action.op][axis] += seconds / times[action.op]
        timed.streams.waited_s.clear()
    return waited


def _halved(compute: Mapping[str, float]) -> dict[str, float]:
    return {phase: s * (0.5 if phase == "backward" else 1.0) for phase, s in compute.items()}


def hop_s(work: RankWork) -> float:
    """The seconds of the largest message of this rank to another stage, by their mean sizes."""
    sent = work.found.dry_step.middle
    sizes = [t.sent_bytes / t.calls for k, t in sent.items() if k[:2] == (PIPELINE, "send")]
    one = Tally(calls=1, sent_bytes=round(max(sizes, default=0)))
    return work.network.seconds({Key(PIPELINE, "send", ""): one}).get(PIPELINE, 0.0)


def _late(work: RankWork, timeline: Timeline) -> dict[str, float]:
    """By axis, how late the last sum of gradients ends, if stages are like this rank's."""
    here = timeline.schedule.stages(
        work.found.plan.mesh.coordinate(work.found.rank).get(PIPELINE, 0)
    )
    one = defaultdict[str, float](float)
    for each in (moves for unit in range(len(work.groups)) for moves in work.sums(unit)):
        for axis, seconds in each.items():
            one[axis] += seconds / len(here)
    ends = [0.0]
    for row in timeline.spans:
        end = 0.0
        for span in row:
            if span.action == Action("REDUCE", span.action.stage):
                end = max(end, span.start) + sum(one.values())
        ends.append(end)
    whole, alone = sum(one.values()), 1 - work.cluster.device.overlap
    late_s, whole = max(alone * whole, max(ends) - timeline.makespan), whole or 1.0
    return {axis: late_s * seconds / whole for axis, seconds in one.items()}
