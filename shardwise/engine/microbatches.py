"""this file is a pass over the microbatches of a step: forward and backward, one by one."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.core.model_spec import Crossed
from shardwise.engine.tensor_layout import Tensors
from shardwise.parallel.data.hooks import Data

Objective = Callable[[nn.Module, Any], Tensor]


class Pass(Protocol):
    """What takes a step's microbatches forward and backward.

    `parts` are the microbatches, `counts` their tokens. The sum of the loss over tokens is
    multiplied by `sum_scale`, a power of two, before it is differentiated.  Returns the sum of loss
    times tokens, a double, as far as it is known here.
    """

    microbatches: int
    sent: list[Crossed]

    def run(self, parts: Sequence[Any], counts: Sequence[int], sum_scale: float) -> Tensor: ...

    def evaluate(self, call: Callable[[nn.Module], Tensor]) -> Tensor | None:
        """What `call` makes of the model, without gradients; None where it is not known here."""
        ...


class Straight:
    """One microbatch after the other through the whole model; data.py's hooks do the rest."""

    def __init__(
        self, model: nn.Module, data: Data, tensors: Tensors, objective: Objective, device: Any
    ) -> None:
        self.model, self.data, self.tensors = model, data, tensors
        self.objective, self.device = objective, device
        self.microbatches = 1
        self.sent: list[Crossed] = []  # nothing goes from stage to stage

    def run(self, parts: Sequence[Any], counts: Sequence[int], sum_scale: float) -> Tensor:
        """All microbatches; gradients are summed over the ranks with the last."""
        summed = torch.zeros((), dtype=torch.float64, device=self.device)
        for k, (part, count) in enumerate(zip(parts, counts, strict=True)):
            self.data.sums.sync, self.data.mute = k == len(parts) - 1, count == 0
            with self.tensors.random.during(self.device):
                loss = self.objective(self.model, part)
                self.data.facts.phase("backward")
                (loss * (count * sum_scale)).backward()
            if count:  # the mean over no tokens may be NaN
                summed += loss.detach().double() * count
        return summed

    def evaluate(self, call: Callable[[nn.Module], Tensor]) -> Tensor | None:
        self.tensors.stream.begin()
        return call(self.model)
