"""The time of a step of a run, measured and predicted for the cluster `run.cluster`.

The measured time is the median over the steps of this program after its first WARM ones, on rank 0.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from shardwise.prediction.search.result import parts_of
from shardwise.prediction.time.step_time import StepTime
from shardwise.train.measure.metrics import Record
from shardwise.train.report.section import MEASURED, PREDICTED, Check, ReportTable, Section

WARM: Final = 3
FILE: Final = "step_time.json"


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
        said = [f"{self.text}. `{FILE}` has the numbers."]
        if self.predicted.unmodelled:
            said += [f"The time of {', '.join(self.predicted.unmodelled)} is not predicted."]
        return Section("Time", sentences=said, table=ReportTable(["part of a step", "ms"], rows))


def time_cost(cluster: str, predicted: StepTime, records: Sequence[Record]) -> TimeCost | None:
    """The time of a step by the records of this program; None if they are all warm-up."""
    times = [record.seconds for record in records[WARM:]]
    return TimeCost(cluster, predicted, median(times), len(times)) if times else None


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"
