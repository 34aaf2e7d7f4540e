"""A finished run, as rank 0 saw it: its records, and each rank's memory, traffic and times."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from shardwise.comm.move import all_gather_object
from shardwise.engine.engine import Engine
from shardwise.prediction.time.step_time import StepTime
from shardwise.train.config import Config
from shardwise.train.data.packed import Packed
from shardwise.train.metrics import Record

WARM: Final = 3


@dataclass(frozen=True)
class TimeCost:
    """The time of a step, measured over `steps` steps and predicted for a cluster."""

    cluster: str
    predicted: StepTime
    measured_s: float
    steps: int

    @property
    def ratio(self) -> float:
        return self.predicted.seconds / self.measured_s

    @property
    def text(self) -> str:
        return (
            f"{milliseconds(self.measured_s)} ms (median of {self.steps} steps), predicted "
            f"{milliseconds(self.predicted.seconds)} ms for {self.cluster}: "
            f"{self.ratio:.2f} of measured"
        )

    def as_json(self) -> dict[str, Any]:
        measured = {"measured_s": self.measured_s, "steps": self.steps, "ratio": self.ratio}
        return {"cluster": self.cluster, **measured, "predicted": self.predicted.as_json()}


def time_cost(cluster: str, predicted: StepTime, records: Sequence[Record]) -> TimeCost | None:
    """By the records of this program; None if they are all warm-up."""
    times = [record.seconds for record in records[WARM:]]
    return TimeCost(cluster, predicted, median(times), len(times)) if times else None


def milliseconds(seconds: float) -> str:
    """0.0123 -> '12.30'."""
    return f"{1e3 * seconds:,.2f}"


@dataclass(frozen=True)
class SaveCosts:
    """The costs of the checkpoints that this process saved.

    saves    checkpoints that were published
    held_s   seconds in which no step ran, for whole saves and for snapshots
    write_s  seconds of threads that wrote beside the steps; 0 for synchronous saves
    """

    saves: int = 0
    held_s: float = 0.0
    write_s: float = 0.0

    def text(self) -> str:
        beside = f"; written beside them in {self.write_s:.2f} s" if self.write_s else ""
        return f"{self.saves} saved, which held the steps for {self.held_s:.2f} s{beside}"


def disk_line(engine: Engine) -> str:
    """The line of rank 0; "" on other ranks, and for a run without a disk. All ranks call it."""
    if engine.disk is None:
        return ""
    engine.disk.sync()
    found = all_gather_object(engine.disk.use.so_far, engine.world)
    if engine.world.rank != 0:
        return ""
    read = _rate([(used.read_bytes, used.read_s) for used in found])
    wrote = _rate([(used.written_bytes, used.written_s) for used in found])
    waited_s = max(used.waited_s for used in found)
    return (
        f"disk {engine.disk.folder}: {len(found)} ranks read {read} and wrote {wrote}; "
        f"they waited {waited_s:.1f} s for it"
    )


def _rate(ranks: list[tuple[int, float]]) -> str:
    mib = sum(count for count, _ in ranks) / 2**20
    return f"{mib:.0f} MiB at {mib / max(1e-9, *(busy_s for _, busy_s in ranks)):.0f} MiB/s"


@dataclass(frozen=True)
class RankCost:
    """A rank's memory by category and traffic per step by kind: measured and predicted.
    `routed` are the kinds that the routing of tokens decides; `peak_bytes` is that of the process.
    """

    memory: dict[str, int]
    predicted_memory: dict[str, int]
    sent: dict[str, int]
    predicted_sent: dict[str, int]
    routed: tuple[str, ...] = ()
    peak_bytes: int = 0


@dataclass(frozen=True)
class Summary:
    """A finished run, as rank 0 saw it. `unigram` is in nats per token.
    `costs` has an entry for every rank. `best` names the checkpoint with the lowest validation
    loss, if it is kept. `time` is a step's of rank 0, with a cluster. `began` is the step after
    which this process started or resumed the run: the speed is that of the steps since then.
    """

    config: Config
    plan: str
    ranks: int
    parameters: int
    packed: Packed
    records: Sequence[Record]
    unigram: float
    costs: Sequence[RankCost]
    began: int = 0
    saves: SaveCosts = field(default_factory=SaveCosts)
    best: str = ""
    time: TimeCost | None = None

    @property
    def validation(self) -> float | None:
        known = [r.validation for r in self.records if r.validation is not None]
        return known[-1] if known else None

    @property
    def recent(self) -> Sequence[Record]:
        return [record for record in self.records if record.step > self.began] or self.records

    @property
    def speed(self) -> float:
        return median(record.tokens_per_s for record in self.recent)

    @property
    def mfu(self) -> float | None:
        """The median of the recent steps; None if the peak of the device is not known."""
        known = [record.mfu for record in self.recent if record.mfu is not None]
        return median(known) if known else None

    @property
    def seconds(self) -> float:
        return sum(record.seconds for record in self.records)

    def bits(self, nats: float) -> float:
        return nats / math.log(2) / self.packed.bytes_per_token
