"""The memory and the bytes sent of one rank of a plan, computed before any rank starts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.core.plan.plan import Plan
from shardwise.core.schedule.schedule import Action
from shardwise.core.tally import Key, Tally, by_kind, sent_bytes
from shardwise.core.zero import Tier, by_tier

if TYPE_CHECKING:
    from shardwise.prediction.cluster import Cluster
    from shardwise.prediction.time.step_time import StepTime


# --- what a rank issues in a step, in order, as a dry run records it (observe/step_bytes.py) ------
#
# kernels     on the stream that computes
# messages    and copies between tiers, each on the stream of its axis; and the waits for them
# actions     of the schedule, each where it is over; the rest of a step follows the last


class Operation(NamedTuple):
    """A kernel.

    dtype        of its largest input, by torch's name
    flops        of a product, as torch's FlopCounterMode counts
    done_flops   what the kernel computes: causal attention computes half of `flops`
    moved_bytes  of the tensors that it reads and writes
    backward     in a backward pass
    again        in a recomputation
    """

    dtype: str
    flops: int
    done_flops: int
    moved_bytes: int
    backward: bool = False
    again: bool = False


class Begun(NamedTuple):
    """A message or a copy begins, of so many bytes that this rank sends."""

    number: int
    key: Key
    sent_bytes: int


class Waited(NamedTuple):
    """What follows needs the message or copy of this number."""

    number: int


Issued = Operation | Begun | Waited | Action


# --- predictions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DryStep:
    """A step, as a dry run of the engine finds it.

    sent              what it sends, by axis, kind and phase
    memory            the bytes that rest after it, by tier and category
    device            the most bytes on the device, and `parts` by category at that moment
    activations       the most that autograd keeps there at once, host_activations in host memory
    fetched           the most of these that are back on the device at once
    issued            by `few`, the plan perhaps with fewer equal microbatches, in order
    recomputed        the kinds of recomputed modules, by name
    trained           the trained parameters of each unit of the rank
    stages            the parameters of each stage of a pipeline
    note              what depends on the values of the batch
    """

    sent: Mapping[Key, Tally]
    memory: Mapping[Tier, Mapping[str, int]]
    device: int
    parts: Mapping[str, int]
    activations: int
    host_activations: int
    fetched: int
    few: Plan
    issued: Sequence[Issued] = ()
    recomputed: Mapping[str, str] = field(default_factory=dict[str, str])
    trained: Sequence[int] = ()
    stages: Sequence[int] = ()
    note: str = ""


@dataclass(frozen=True)
class Prediction:
    """The memory and the traffic of one rank of a plan.

    norm    gradients are clipped by their norm
    tokens  of a step, over all ranks; 0 if the model reads no text
    told    notes on the results
    dry     makes the step of a plan and a rank for the same model and batch; with brief=True of
            microbatches that show what actions issue, and no more
    """

    plan: Plan
    rank: int
    norm: bool = False
    tokens: int = 0
    told: tuple[str, ...] = ()
    dry: Callable[..., DryStep] | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"dry": None}

    def on(self, rank: int, plan: Plan | None = None) -> "Prediction":
        return replace(self, plan=self.plan if plan is None else plan, rank=rank)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.dry_step.note, *self.told)))

    @property
    def world(self) -> int:
        return self.plan.size

    @property
    def recomputed(self) -> Mapping[str, str]:
        return self.dry_step.recomputed

    @property
    def recomputed_flops(self) -> int:
        """The operations that recomputation adds to a step, for microbatches of one size."""
        step = self.dry_step
        own = (each for each in step.issued if isinstance(each, Operation))
        again = sum(each.flops for each in own if each.again)
        return again * self.plan.microbatches // step.few.microbatches

    @property
    def dry_step(self) -> DryStep:
        """A step of a dry run, which is made when it is first read."""
        return self._dry(self.plan, self.rank)

    def brief_step(self, rank: int) -> DryStep:
        return self.dry_step if rank == self.rank else self._dry(self.plan, rank, brief=True)

    @property
    def _dry(self) -> Callable[..., DryStep]:
        if self.dry is None:
            raise ValueError("a prediction from another process has no model to run")
        return self.dry

    @property
    def activations(self) -> int:
        """The most bytes that autograd keeps on the device at once, with torch's own kernels."""
        return self.dry_step.activations

    @property
    def host_activations(self) -> int:
        """The same in host memory."""
        return self.dry_step.host_activations

    @property
    def fetched(self) -> int:
        return self.dry_step.fetched

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of the device held between steps, by category."""
        return dict(self.dry_step.memory["device"])

    @property
    def host_memory(self) -> dict[str, int]:
        """Bytes of host memory held between steps, by category."""
        return dict(self.dry_step.memory["host"])

    @property
    def device_peak(self) -> int:
        """The bytes that the rank stores on its device in a step, at most.
        What a kernel takes and frees inside of one operation is not among them.
        """
        return self.dry_step.device

    @property
    def disk_memory(self) -> dict[str, int]:
        """Bytes on a disk held between steps, by category."""
        return dict(self.dry_step.memory["disk"])

    @property
    def memory_by_tier(self) -> dict[str, int]:
        """All: under names such as "optimizer on the host" and "optimizer on disk"."""
        return by_tier(self.memory, self.host_memory, self.disk_memory)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes sent in a step, by axis and kind, such as "dp all_gather".

        Copies between tiers are on the axis "tier".  The first steps of a run send a little more:
        ranks compare batches and gradients.  Experts have an even load.
        """
        return by_kind(self.sent())

    def sent(self) -> dict[Key, int]:
        """Bytes sent in a step, by axis, kind and phase."""
        return sent_bytes(self.dry_step.sent)

    @property
    def messages(self) -> dict[str, int]:
        """Messages of `bytes`, by axis and kind; one for each move of a unit or an activation."""
        return by_kind({key: tally.calls for key, tally in self.dry_step.sent.items()})

    def step_time(self, cluster: "Cluster | str | Path") -> "StepTime":
        """The seconds of a step on a cluster: a `Cluster`, the name of a preset, or a file.
        Raises InputError for a wrong cluster.
        """
        from shardwise.prediction.time.step_time import step_time

        return step_time(self, cluster)

    def message_seconds(self, cluster: "Cluster") -> dict[str, float]:
        """The seconds of `bytes` if none overlap, by axis and kind; copies between tiers apart."""
        from shardwise.prediction.time.network import Network

        every = Network(cluster, self.plan, self.rank).seconds(self.dry_step.sent)
        return {f"{axis} {kind}": seconds for (axis, kind), seconds in every.items()}
