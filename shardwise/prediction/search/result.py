"""What a search found: plans in the order of their step's time, and those that are refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.core.plan.plan import Plan
from shardwise.prediction.cluster import Cluster
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.relief import largest, peak_parts, relieved
from shardwise.prediction.time.step_time import StepTime


@dataclass(frozen=True)
class RankedPlan:
    """A plan that fits.

    rows        of a microbatch
    peak_bytes  the most that a rank stores on its device, temporary memory of kernels apart
    sent_bytes  that rank 0 sends in a step, by axis
    """

    plan: Plan
    rows: int
    time: StepTime
    peak_bytes: int
    sent_bytes: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.time.seconds

    @property
    def bound(self) -> str:
        """The largest part of the time: "compute", "exposed dp", "bubble" or "update"."""
        parts = parts_of(self.time)
        return max(parts, key=lambda name: parts[name])

    def as_json(self) -> dict[str, Any]:
        """The values as an object of JSON."""
        found = {"plan": str(self.plan), "bound": self.bound, "device_peak": self.peak_bytes}
        return found | {"bytes": dict(self.sent_bytes), "step_time": self.time.as_json()}


@dataclass(frozen=True)
class RefusedPlan:
    """A plan that cannot run. `over_bytes`: by how much it exceeds the device's memory, at least.

    It is 0 for one that is refused for another reason.
    """

    plan: Plan
    reason: str
    rows: int = 1
    over_bytes: int = 0


@dataclass(frozen=True)
class SearchResult:
    """The result of a search for a batch of so many rows in a step of all ranks.

    ranked   the plans whose time was predicted, the shortest first
    refused  those that do not fit or cannot run, the nearest to fitting first
    slower   the number of plans that cannot be among the first: a part of their time alone is
             longer, or they recompute more than a plan that fits
    fits_on  where nothing fits, a larger number of ranks on which a plan does; None without one
    """

    cluster: Cluster
    ranks: int
    batch: int
    ranked: tuple[RankedPlan, ...]
    refused: tuple[RefusedPlan, ...]
    slower: int = 0
    fits_on: int | None = None

    @property
    def best(self) -> RankedPlan | None:
        """The plan with the shortest step; None if nothing fits."""
        return self.ranked[0] if self.ranked else None

    @property
    def nearest(self) -> RefusedPlan | None:
        """The plan that exceeds the memory by least; None if none does."""
        return next((each for each in self.refused if each.over_bytes), None)

    def why(self, found: Prediction) -> str:
        """What is wrong with a plan that was predicted for the same task, in sentences.

        It does not fit: by how much, and what would relieve it. It is slower: where its time goes,
        beside that of the best.
        """
        parts, room = peak_parts(found), self.cluster.device.memory_bytes
        over = sum(parts.values()) - room
        if over > 0:
            part = largest(parts)
            text = (
                f'"{found.plan}" does not fit: its peak is {sum(parts.values()):,} bytes, {over:,} '
                f"more than a device has. The largest part is {part}: {parts[part]:,} bytes."
            )
            instead = relieved(found.plan, part)
            return text + f' "{instead}" makes it smaller.' * (instead is not None)
        time, best = found.step_time(self.cluster), self.best
        text = f'"{found.plan}" fits, and takes {time.seconds:.4g} s.'
        own = parts_of(time)
        if best is None or best.plan == found.plan:
            return text + f" Its time is {_listed(own)}."
        theirs = parts_of(best.time)
        text += f' The best, "{best.plan}", takes {best.seconds:.4g} s.'
        more = {n: own.get(n, 0.0) - theirs.get(n, 0.0) for n in own | theirs}
        return text + f" The difference is {_listed(more, '+.3g')}."

    def as_json(self, most: int) -> dict[str, Any]:
        """The first `most` plans, the nearest where nothing fits, and the counts of the others."""
        near = self.nearest if self.best is None else None
        return {
            "ranks": self.ranks,
            "batch": self.batch,
            "ranked": [each.as_json() for each in self.ranked[:most]],
            "refused": len(self.refused),
            "slower": self.slower,
            "nearest": None if near is None else [str(near.plan), near.over_bytes],
            "fits_on": self.fits_on,
        }


def _listed(parts: Mapping[str, float], form: str = ".3g") -> str:
    """Seconds by name, the longest first."""
    ordered = sorted(parts.items(), key=lambda part: -abs(part[1]))
    return ", ".join(f"{name} {seconds:{form}} s" for name, seconds in ordered if seconds)


def parts_of(time: StepTime) -> dict[str, float]:
    """The parts of a step's time that are not zero, by name."""
    parts = {"compute": time.compute_s}
    parts |= {f"exposed {axis}": seconds for axis, seconds in time.exposed_s.items()}
    parts |= {"bubble": time.bubble_s, "update": time.update_s}
    return {name: seconds for name, seconds in parts.items() if seconds}
