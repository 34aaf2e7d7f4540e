"""The memory and the bytes sent of one rank of a plan, computed before any rank starts."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardwise.comm.ledger import Key, by_kind
from shardwise.core.buffer_sizes import pool_bytes
from shardwise.core.model_spec import ModelShape, ModelSpec
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import CATEGORIES, Tier, by_tier
from shardwise.prediction.rank_shape import added_flops_on, shape_on
from shardwise.prediction.stored_bytes import ADAM, OptimizerShape, held_bytes
from shardwise.prediction.traffic import (
    Counted,
    Price,
    Share,
    step_bytes,
)
from shardwise.techniques.context.price import CONTEXT
from shardwise.techniques.expert.price import EXPERT
from shardwise.techniques.layers.price import LAYERS
from shardwise.techniques.offload.price import OFFLOAD
from shardwise.techniques.pipeline.price import PIPELINE
from shardwise.techniques.recompute.price_step import RECOMPUTE
from shardwise.techniques.tensor.price import TENSOR

if TYPE_CHECKING:
    from shardwise.prediction.cluster import Cluster
    from shardwise.prediction.time.step_time import StepTime

# --- the prices of all techniques: a new one is one line here -------------------------------------

PRICES: Final[tuple[Price, ...]] = (PIPELINE, TENSOR, CONTEXT, RECOMPUTE, LAYERS, OFFLOAD, EXPERT)


@dataclass(frozen=True)
class StepPeaks:
    """The memory of a step, as a dry run of the engine finds it.

    device            the most bytes on the device, and `parts` by category at that moment
    activations       the most that autograd keeps there at once, host_activations in host memory
    fetched           the most of these that are back on the device at once
    """

    device: int
    parts: Mapping[str, int]
    activations: int
    host_activations: int
    fetched: int


@dataclass(frozen=True)
class Prediction:
    """The memory and the traffic of one rank of a plan.

    model              the rank's part of `spec`, the full model
    norm               gradients are clipped by their norm
    broadcast_buffers  a step begins with rank 0's buffers
    device             "cpu" or "cuda"
    notes              name results that depend on the values of the batch
    dry                makes the peaks of a plan and a rank for the same model and batch
    """

    plan: Plan
    rank: int
    model: ModelShape
    spec: ModelSpec
    optimizer: OptimizerShape = ADAM
    norm: bool = False
    broadcast_buffers: bool = True
    device: str = "cpu"
    notes: tuple[str, ...] = ()
    dry: Callable[[Plan, int], StepPeaks] | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Without the model that a dry run has."""
        return vars(self) | {"dry": None}

    def on(self, rank: int, plan: Plan | None = None) -> "Prediction":
        """The prediction for a rank with the same place on the tensor axis, or another offload."""
        plan = self.plan if plan is None else plan
        return replace(self, plan=plan, rank=rank, model=shape_on(self.spec, plan, rank))

    @property
    def world(self) -> int:
        return self.plan.size

    @property
    def recomputed(self) -> Mapping[str, str]:
        return self.spec.recomputed

    @property
    def recomputed_flops(self) -> int:
        """The operations that recomputation adds to a step, for microbatches of one size."""
        return added_flops_on(self.spec, self.plan, self.rank)

    @property
    def peaks(self) -> StepPeaks:
        """Those of a dry run, which is made when they are first read."""
        if self.dry is None:
            raise ValueError("a prediction from another process has no model to run")
        return self.dry(self.plan, self.rank)

    @property
    def activations(self) -> int:
        """The most bytes that autograd keeps on the device at once, with torch's own kernels."""
        return self.peaks.activations

    @property
    def host_activations(self) -> int:
        """The same in host memory."""
        return self.peaks.host_activations

    @property
    def fetched(self) -> int:
        return self.peaks.fetched

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of the device held between steps, by category."""
        pool = pool_bytes(self.plan, self.spec.shape.stored_bytes, self.device)
        unused = self.spec.run.unused
        rows = held_bytes(self.plan, self.model, self.optimizer, self.rank, pool, unused)
        return self._stored("device", rows)

    @property
    def host_memory(self) -> dict[str, int]:
        """Bytes of host memory held between steps, by category."""
        return self._stored("host", dict.fromkeys(CATEGORIES, 0))

    @property
    def device_peak(self) -> int:
        """The bytes that the rank stores on its device in a step, at most.
        What a kernel takes and frees inside of one operation is not among them.
        """
        return self.peaks.device

    @property
    def disk_memory(self) -> dict[str, int]:
        """Bytes on a disk held between steps, by category."""
        return self._stored("disk", dict.fromkeys(CATEGORIES, 0))

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
        found = Counter[Key]()
        for sent in self._sent():
            found.update(sent)
        return dict(found)

    @property
    def messages(self) -> dict[str, int]:
        """Messages of `bytes`, by axis and kind; one for each move of a unit or an activation."""
        found = Counter[Key]()
        for sent in self._sent():
            found.update(sent.messages)
        return by_kind(found)

    def step_time(self, cluster: "Cluster | str | Path", *, prefetch: int = 1) -> "StepTime":
        """The seconds of a step on a cluster: a `Cluster`, the name of a preset, or a file.

        `prefetch` is the option of `parallelize`. Raises InputError for a wrong cluster.
        """
        from shardwise.prediction.time.step_time import step_time

        return step_time(self, cluster, prefetch)

    def message_seconds(self, cluster: "Cluster") -> dict[str, float]:
        """The seconds of `bytes` if none overlap, by axis and kind; copies between tiers apart."""
        from shardwise.prediction.time.step_time import Network

        network, found = Network(cluster, self.plan, self.rank), dict[str, float]()
        for sent in self._sent():
            for (axis, kind), seconds in network.seconds_by_kind(sent).items():
                name = f"{axis} {kind}"
                found[name] = found.get(name, 0.0) + seconds
        return found

    def _sent(self) -> Iterator[Counted]:
        yield step_bytes(
            self.plan,
            self.model,
            self.rank,
            norm=self.norm,
            optimizer=self.optimizer,
            buffers=self.broadcast_buffers,
        )
        share = self.share()
        yield from (each.sends(share) for each in PRICES)

    def _stored(self, tier: Tier, rows: Mapping[str, int]) -> dict[str, int]:
        found, share = Counter(rows), self.share()
        for each in PRICES:
            found.update(each.stores(share, tier))
        return dict(found)

    def share(self) -> Share:
        return Share(self.plan, self.spec, self.model, self.rank, self.optimizer)
