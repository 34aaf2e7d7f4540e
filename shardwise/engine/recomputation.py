"""Recomputation in an engine: the modules that it recomputes, and their generators."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.core.errors import bad
from shardwise.core.plan import Plan
from shardwise.engine.rng import STATES, generators_of
from shardwise.engine.tensor_layout import Tensors
from shardwise.parallel.data.wrap_policy import Rule, blocks
from shardwise.parallel.recompute.checkpointed import NONE, Recomputed, recompute
from shardwise.parallel.recompute.choice import chosen
from shardwise.parallel.recompute.generators import Generators

Choose = Callable[[Any], Mapping[str, str]]


def fitting(
    model: nn.Module, plan: Plan, units: Rule = "auto", starts: Sequence[str] = ()
) -> dict[str, str]:
    """The modules that the plan recomputes, by name; `starts` begin the stages of a pipeline.

    Raises InputError if the plan names no module, or one that lies in several stages.
    """
    kinds = chosen(model, plan.recompute, blocks(model, units) if plan.recompute else {})
    for name in kinds:
        inside = next((start for start in starts if start.startswith(f"{name}.")), None)
        if inside is not None:
            raise bad(
                f"recompute:{plan.recompute}, which recomputes {name}, with a stage that begins "
                f"inside of it at {inside}",
                "modules that lie in one stage",
                f"a stage that begins at {name}, or recompute:{inside}",
            )
    return kinds


class Recomputation:
    """The modules of an engine that are recomputed; under a budget chosen for each batch's shapes.

    `choose` gives the kinds of the modules for a batch.
    """

    def __init__(self, kinds: Mapping[str, str], choose: Choose | None = None) -> None:
        self.kinds, self.choose = kinds, choose
        self.modules: dict[str, Recomputed] = {}
        self.known: dict[object, Mapping[str, str]] = {}

    def apply(self, model: nn.Module, device: torch.device, tensors: Tensors) -> None:
        """Recompute the activations of the modules, in place.

        Under sequence parallelism the inputs of modules are shards already.
        """
        generators = Generators(generators_of(device), STATES)
        whole = tensors.axis.size > 1 and not tensors.stream.split
        axis = tensors.axis if whole else None
        self.modules = recompute(model, self.kinds, generators, axis)

    def begin(self, batch: Any) -> None:
        """A step on `batch` begins. Raises InputError for a budget that cannot be met."""
        if self.choose is None:
            return
        shapes = tuple((x.shape, x.dtype) for x in tree_leaves(batch) if isinstance(x, Tensor))
        if shapes not in self.known:
            self.known[shapes] = self.choose(batch)
        self.kinds = self.known[shapes]
        for name, module in self.modules.items():
            module.kind = self.kinds.get(name, NONE)
