"""What a rank will hold and send under a plan: computed from numbers, before any rank starts."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.core.model_spec import ModelShape, ModelSpec
from shardwise.core.plan import Plan
from shardwise.prediction.memory import ADAM, OptimizerShape, held_bytes
from shardwise.prediction.traffic import Line, by_kind, stage_bytes, step_bytes, tensor_bytes


@dataclass(frozen=True)
class Prediction:
    """The memory and the traffic of one rank of a plan.

    `model` is what the rank holds of `spec`, which is the whole model.
    `norm`: gradients are clipped by their norm. `activations` are the most bytes that autograd
    keeps from forward to backward at once, with torch's own kernels. `notes` name what depends on
    the values of the batch.
    """

    plan: Plan
    rank: int
    model: ModelShape
    spec: ModelSpec
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
        every = (
            step_bytes(self.plan, self.model, self.rank, compares=compares, **options),
            stage_bytes(self.plan, self.spec, self.rank),
            tensor_bytes(self.plan, self.spec, self.rank),
        )
        lines = {line for one in every for line in one}
        return {line: sum(one.get(line, 0) for one in every) for line in lines}
