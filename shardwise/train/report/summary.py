"""A finished run, as rank 0 saw it: its records, and what each rank held and sent."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from shardwise.train.config import Config
from shardwise.train.data.packed import Packed
from shardwise.train.measure.metrics import Record
from shardwise.train.measure.run_costs import SaveCosts, TimeCost


@dataclass(frozen=True)
class RankCost:
    """A rank's memory by category and traffic per step by kind: measured and predicted.

    Predictions are empty if they are not possible. `bytes_between` has the least and the most bytes
    of the kinds that depend on values. `peak_bytes` is the most memory of the rank's process.
    """

    memory: dict[str, int]
    predicted_memory: dict[str, int]
    sent: dict[str, int]
    predicted_sent: dict[str, int]
    bytes_between: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    peak_bytes: int = 0

    @property
    def memory_agrees(self) -> bool | None:
        """Whether each category has the predicted bytes; None without a prediction."""
        return _agree(self.memory, {k: (n, n) for k, n in self.predicted_memory.items()})

    @property
    def sent_agrees(self) -> bool | None:
        """Whether each kind has the predicted bytes, or is between its bounds."""
        exact = {kind: (n, n) for kind, n in self.predicted_sent.items()}
        return _agree(self.sent, exact | self.bytes_between)


def _agree(measured: dict[str, int], bounds: dict[str, tuple[int, int]]) -> bool | None:
    """Whether what was measured is within the bounds of its name."""
    names = measured.keys() & bounds.keys()
    inside = [bounds[name][0] <= measured[name] <= bounds[name][1] for name in names]
    return all(inside) if inside else None


def all_agree(found: Iterable[bool | None]) -> bool | None:
    """False if one is False; None if nothing is known."""
    known = [one for one in found if one is not None]
    return all(known) if known else None


@dataclass(frozen=True)
class Summary:
    """A finished run, as rank 0 saw it. `unigram` is in nats per token.

    `costs` has an entry for every rank. `best` names the checkpoint with the lowest validation
    loss, if it is kept. `time` is that of a step of rank 0, with a cluster. `began` is the step
    after which this process started or resumed the run: the speed is that of the steps since then.
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
        """The loss of the last evaluation in nats per token."""
        return next(
            (r.validation for r in reversed(self.records) if r.validation is not None), None
        )

    @property
    def recent(self) -> Sequence[Record]:
        """The records of the steps of this process; all records if it made no step."""
        return [record for record in self.records if record.step > self.began] or self.records

    @property
    def speed(self) -> float:
        """Tokens per second: the median of the recent steps."""
        return median(record.tokens_per_s for record in self.recent)

    @property
    def mfu(self) -> float | None:
        """The median of the recent steps; None if the peak of the device is not known."""
        known = [record.mfu for record in self.recent if record.mfu is not None]
        return median(known) if known else None

    @property
    def seconds(self) -> float:
        """The time in all steps."""
        return sum(record.seconds for record in self.records)

    @property
    def memory(self) -> tuple[int, RankCost]:
        """The first of the ranks with the most memory, and its cost."""
        return max(enumerate(self.costs), key=lambda of: sum(of[1].memory.values()))

    @property
    def sent(self) -> tuple[int, RankCost]:
        """The first of the ranks that send most, and its cost."""
        return max(enumerate(self.costs), key=lambda of: sum(of[1].sent.values()))

    def bits(self, nats: float) -> float:
        """Nats per token, converted to bits per byte of text."""
        return nats / math.log(2) / self.packed.bytes_per_token
