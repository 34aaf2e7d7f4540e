"""What a rank will hold and send under a plan: computed from numbers, before any rank starts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwise.core.model_spec import ModelShape, ModelSpec
from shardwise.core.plan import Plan
from shardwise.predict.gathers import gathers
from shardwise.predict.memory import ADAM, OptimizerShape, held_bytes
from shardwise.predict.traffic import Line, by_kind, step_bytes


@dataclass(frozen=True)
class Prediction:
    """The memory and the traffic of one rank of a plan.

    `norm`: gradients are clipped by their norm. `activations` are the most bytes that autograd
    keeps from forward to backward at once, with torch's own kernels. `notes` name what depends on
    the values of the batch.
    """

    plan: Plan
    rank: int
    model: ModelShape
    optimizer: OptimizerShape = ADAM
    norm: bool = False
    activations: int = 0
    notes: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """How many ranks the plan has."""
        return self.plan.size

    @property
    def memory(self) -> dict[str, int]:
        """Bytes held between steps, by category."""
        return held_bytes(self.plan, self.model, self.optimizer, self.rank)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes sent in a step, by axis and kind, such as "dp all_gather".

        The first steps of a run send a little more: ranks compare batches and gradients.
        """
        return by_kind(self.sent())

    def sent(
        self, *, first: bool = False, meets: bool = False, compares: str = ""
    ) -> dict[Line, int]:
        """Bytes sent in a step, by axis, kind and phase; the options are those of `step_bytes`."""
        options: Mapping[str, bool] = {"norm": self.norm, "first": first, "meets": meets}
        return step_bytes(self.plan, self.model, self.rank, compares=compares, **options)


def shape_on(spec: ModelSpec, plan: Plan, rank: int) -> ModelShape:
    """The units as `rank` holds them, and how often it gathers each."""
    del plan, rank
    times = gathers(spec.modules, spec.run)
    units = tuple(
        replace(unit, uses=uses, again=again)
        for unit, (uses, again) in zip(spec.shape.units, times, strict=True)
    )
    return ModelShape(units, spec.shape.buffers)


def activation_bytes_on(spec: ModelSpec, plan: Plan, rank: int) -> int:
    """The most bytes of activations that `rank` keeps at once."""
    del plan, rank
    return sum(stored_bytes for _, stored_bytes in spec.run.saved)
