"""Experts of a run: loads, dropped choices and the gate's entropy in a step."""

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.comm.objects import all_gather_object
from shardwise.engine.engine import Engine
from shardwise.techniques.expert.apply import ExpertLayout
from shardwise.techniques.expert.moe_layer import Load
from shardwise.train.metrics import Record


class StepLoads(NamedTuple):
    """The layers of experts of all stages in a training step. `computed` has choices by layer and
    expert. `dropped` is the share of choices beyond the capacity. `entropy`, in nats, is that of a
    token's probabilities, the mean over tokens and layers; None if no layer reports it.
    """

    computed: dict[str, list[int]] | None = None
    dropped: float | None = None
    entropy: float | None = None


def step_loads(engine: Engine) -> StepLoads:
    """The loads of the last step. Called by all ranks, since pipeline stages exchange theirs."""
    own = engine.sharded.of(ExpertLayout)
    found: dict[str, Load] = dict(own.loads)
    if own.mixes and engine.staging:
        for loads in all_gather_object(dict(own.loads), engine.world):
            found |= loads
    if not found:
        return StepLoads()
    layers = [found[name] for name in sorted(found, key=_place)]
    wanted = sum(sum(load.wanted) for load in layers)
    entropies = [load.entropy for load in layers if load.tokens]
    return StepLoads(
        {name: list(found[name].computed) for name in sorted(found, key=_place)},
        sum(load.dropped for load in layers) / max(1, wanted),
        sum(entropies) / len(entropies) if entropies else None,
    )


def _place(name: str) -> list[tuple[int, str]]:
    """A sort key: blocks.2 comes before blocks.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def relative_loads(loads: dict[str, list[int]]) -> dict[str, list[float]]:
    return {name: [len(own) * n / max(1, sum(own)) for n in own] for name, own in loads.items()}


def sum_loads(records: Sequence[Record]) -> dict[str, list[int]]:
    """By layer, the sum over all records that have loads."""
    found: dict[str, list[int]] = {}
    for record in records:
        for name, own in (record.expert_loads or {}).items():
            before = found.get(name, [0] * len(own))
            found[name] = [a + b for a, b in zip(before, own, strict=True)]
    return found


def busiest(loads: dict[str, list[int]]) -> float:
    """The largest load of an expert, as a multiple of its layer's mean."""
    return max(max(own) for own in relative_loads(loads).values())


def words(record: Record) -> str:
    """The experts of a step in a few words, or ""."""
    if not record.expert_loads:
        return ""
    most = f"busiest expert {busiest(record.expert_loads):.2f}x the mean"
    dropped = f"{record.dropped or 0:.1%} dropped"
    entropy = "" if record.gate_entropy is None else f", gate entropy {record.gate_entropy:.2f}"
    return f"{most}, {dropped}{entropy}"
