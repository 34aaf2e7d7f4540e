"""What a run costs: the time of a step, measured and predicted; checkpoints; and its disk.

The measured time is the median over the steps of this program after its first WARM ones, on rank 0.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from shardwise.comm.objects import all_gather_object
from shardwise.engine.engine import Engine
from shardwise.prediction.search.result import parts_of
from shardwise.prediction.time.step_time import StepTime
from shardwise.train.measure.metrics import Record
from shardwise.train.report.section import MEASURED, PREDICTED, Check, ReportTable, Section

WARM: Final = 3
STEP_TIME: Final = "step_time.json"


@dataclass(frozen=True)
class TimeCost:
    """The time of a step, measured over `steps` steps and predicted for a cluster."""

    cluster: str
    predicted: StepTime
    measured_s: float
    steps: int

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted.seconds / self.measured_s

    @property
    def text(self) -> str:
        """Both in words."""
        return (
            f"{_ms(self.measured_s)} ms (median of {self.steps} steps), predicted "
            f"{_ms(self.predicted.seconds)} ms for {self.cluster}: {self.ratio:.2f} of measured"
        )

    def check(self) -> Check:
        """How far the prediction is off; a time is never exactly as predicted."""
        return Check("time of a step", None, f"{self.ratio - 1:+.1%} predicted over measured")

    def json(self) -> str:
        """The numbers, and the parts of the prediction."""
        measured = {"measured_s": self.measured_s, "steps": self.steps, "ratio": self.ratio}
        predicted = self.predicted.as_json()
        return json.dumps({"cluster": self.cluster, **measured, "predicted": predicted}, indent=2)

    def section(self) -> Section:
        """The section of the report: the parts of the prediction, and both times."""
        times = {PREDICTED: self.predicted.seconds, MEASURED: self.measured_s}
        rows = [[name, _ms(s)] for name, s in (parts_of(self.predicted) | times).items()]
        said = [f"{self.text}. `{STEP_TIME}` has the numbers."]
        if self.predicted.unmodelled:
            said += [f"The time of {', '.join(self.predicted.unmodelled)} is not predicted."]
        return Section("Time", sentences=said, table=ReportTable(["part of a step", "ms"], rows))


def time_cost(cluster: str, predicted: StepTime, records: Sequence[Record]) -> TimeCost | None:
    """The time of a step by the records of this program; None if they are all warm-up."""
    times = [record.seconds for record in records[WARM:]]
    return TimeCost(cluster, predicted, median(times), len(times)) if times else None


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


@dataclass(frozen=True)
class SaveCosts:
    """The costs of the checkpoints that this process saved.

    saves    checkpoints that were published
    held_s   seconds in which no step ran: those of whole saves, and of snapshots
    write_s  seconds of threads that wrote beside the steps; 0 for synchronous saves
    """

    saves: int = 0
    held_s: float = 0.0
    write_s: float = 0.0

    def text(self) -> str:
        """The costs in words."""
        beside = f"; written beside them in {self.write_s:.2f} s" if self.write_s else ""
        return f"{self.saves} saved, which held the steps for {self.held_s:.2f} s{beside}"


def disk_line(engine: Engine) -> str:
    """The line of rank 0; "" on other ranks, and for a run without a disk.  All ranks call it.

    Evaluations, samples and checkpoints count too.  A rate is that of the time in which some
    request of a rank is under way; `shardwise doctor --disk` measures what the disk gives alone.
    """
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
    """The bytes of all ranks, and their rate."""
    mib = sum(count for count, _ in ranks) / 2**20
    return f"{mib:.0f} MiB at {mib / max(1e-9, *(busy_s for _, busy_s in ranks)):.0f} MiB/s"
