"""DAPPLE's planner: chooses the stages of a model, and the number of replicas of each.

From measured times of the layers, bytes and link speeds it finds the stages and replicas with the
least latency of one step (arXiv 2007.01045, section 4). The r replicas of a stage split each
microbatch, so F and B take 1/r of its layers' sums; before the update the replicas all-reduce the
gradients (AR).  The message between two stages counts as a stage with F = B = its time.

Each stage Q that does not wait between its first forward and its last backward gives a latency,

    F_0 + .. + F_Q  +  (m-1)(F_Q + B_Q)  +  max over s <= Q of (B_Q + .. + B_s + AR_s)
    first forward      steady state          the last backward on its way back

and the step takes the longest of them. The paper chooses Q, its pivot, by a heuristic; here it is
the maximum, which is a lower bound for every schedule, and exact for 1F1B with equal stages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class LayerProfile:
    """The measurements of one layer on one device with a full microbatch."""

    forward_s: float
    backward_s: float
    output_bytes: float
    param_bytes: float = 0.0


@dataclass(frozen=True)
class StageLinks:
    """Bytes per second between two stages and among the replicas of one; latency of a message."""

    between_bytes_s: float = math.inf
    among_bytes_s: float = math.inf
    latency_s: float = 0.0


class PlannedStage(NamedTuple):
    """Layers `first` to `last`, exclusive, on `replicas` devices."""

    first: int
    last: int
    replicas: int


@dataclass(frozen=True)
class Partition:
    """Stages along the model, and the latency of a step in seconds."""

    stages: tuple[PlannedStage, ...]
    latency_s: float


class _Cost(NamedTuple):
    """Forward, backward and all-reduce of a stage, or of the message between two."""

    F: float
    B: float
    AR: float = 0.0


class _Rest(NamedTuple):
    """The stages from some layer to the end of the model, and the times of their step.

    `latency` is the formula above; `turn` is the time until the last backward of the first of these
    stages, without all-reduce. No partition of these layers and devices is better in both.
    """

    latency: float
    turn: float
    stages: tuple[PlannedStage, ...]


def partition(
    layers: Sequence[LayerProfile], devices: int, microbatches: int, links: StageLinks | None = None
) -> Partition:
    """The stages and replicas on exactly `devices` devices with the least latency of a step.

    An exact dynamic program from the last layer to the first: for each first layer and number of
    devices, it keeps every partition that no other beats in both latency and turn.
    """
    links = links or StageLinks()
    n = len(layers)
    ends: dict[tuple[int, int], list[_Rest]] = {(n, 0): [_Rest(0.0, 0.0, ())]}
    for first in reversed(range(n)):
        for devices_left in range(1, devices + 1):
            found = [
                _before(stage, rest, layers, microbatches, links)
                for last in range(first + 1, n + 1)
                for replicas in range(1, devices_left + 1)
                for stage in (PlannedStage(first, last, replicas),)
                for rest in ends.get((last, devices_left - replicas), ())
            ]
            ends[first, devices_left] = _best(found)
    best = min(ends[0, devices])
    return Partition(best.stages, best.latency)


def latency(
    stages: Sequence[PlannedStage],
    layers: Sequence[LayerProfile],
    microbatches: int,
    links: StageLinks | None = None,
) -> float:
    """The seconds of a step with these stages, by the formula above."""
    links = links or StageLinks()
    costs: list[_Cost] = []
    for stage in stages:
        costs += [_message(layers[stage.first - 1], links)] if stage.first else []
        costs.append(_cost(stage, layers, links))
    return max(
        sum(cost.F for cost in costs[: q + 1])
        + (microbatches - 1) * (pivot.F + pivot.B)
        + max(sum(cost.B for cost in costs[s : q + 1]) + costs[s].AR for s in range(q + 1))
        for q, pivot in enumerate(costs)
    )


def _before(
    stage: PlannedStage,
    rest: _Rest,
    layers: Sequence[LayerProfile],
    microbatches: int,
    links: StageLinks,
) -> _Rest:
    """`rest` with one more stage in front of it, and the message between them."""
    late, turn = rest.latency, rest.turn
    costs = [_cost(stage, layers, links)]
    costs += [_message(layers[stage.last - 1], links)] if rest.stages else []
    for F, B, AR in reversed(costs):
        steady = (microbatches - 1) * (F + B)
        turn = F + B + max(steady, turn)
        late = max(F + late, turn + AR)
    return _Rest(late, turn, (stage, *rest.stages))


def _best(found: list[_Rest]) -> list[_Rest]:
    """The partitions that no other beats in both latency and turn."""
    kept: list[_Rest] = []
    for rest in sorted(found):
        if not kept or rest.turn < kept[-1].turn:
            kept.append(rest)
    return kept


def _cost(stage: PlannedStage, layers: Sequence[LayerProfile], links: StageLinks) -> _Cost:
    run, r = layers[stage.first : stage.last], stage.replicas
    reduced_bytes = 2 * (r - 1) / r * sum(layer.param_bytes for layer in run)
    forward_s, backward_s = (sum(x.forward_s for x in run), sum(x.backward_s for x in run))
    return _Cost(forward_s / r, backward_s / r, reduced_bytes / links.among_bytes_s)


def _message(layer: LayerProfile, links: StageLinks) -> _Cost:
    time_s = links.latency_s + layer.output_bytes / links.between_bytes_s
    return _Cost(time_s, time_s)
