"""The loads of experts as one process routes the tokens, by the rows of its batch.

    rows of the global batch    0 1 2 3 | 4 5 6        7 rows on 2 data ranks
    microbatch                  0 0 1 1 | 0 0 1        accumulate:2

The predicted bytes of experts come from these loads, never from the routing of the ranks.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.core.plan import Plan
from shardwise.techniques.expert.apply import experts_in, layers_of
from shardwise.techniques.expert.moves import Counts, Loads
from shardwise.techniques.expert.routing import Routing
from shardwise.techniques.expert.stacked import experts_of, stacked_experts
from shardwise.verify.async_oracle import AsyncOracle
from shardwise.verify.batches import Division
from shardwise.verify.oracle import Oracle


class Choices:
    """How many choices of each token every expert computes, in the last training step of `model`.

    `model` runs in one process; its layers of experts report their routings.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, list[Tensor]] = {}  # by layer: [N, E] of each microbatch
        self.evaluated: dict[str, list[Tensor]] = {}  # the same, of evaluations
        for name, layer in layers_of(model).items():
            layer.place = replace(
                layer.place, on_routing=partial(self._see, name, layer.gate.experts)
            )
        self.by_shard = frozenset(stacked_experts(model))  # under sp
        for name, module in stacked_experts(model).items():
            module.register_forward_pre_hook(partial(self._see_stacked, name))

    def _see(self, name: str, experts: int, routing: Routing) -> None:
        computed = (routing.positions >= 0).unsqueeze(-1)
        self._add(name, functional.one_hot(routing.experts, experts) * computed)

    def _see_stacked(self, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._add(name, functional.one_hot(args[1], experts_of(module)))

    def _add(self, name: str, choices_NKE: Tensor) -> None:
        seen = self.seen if torch.is_grad_enabled() else self.evaluated
        seen.setdefault(name, []).append(choices_NKE.sum(1).cpu())

    def loads(
        self, batch: Any, plan: Plan, division: Division | None = None, *, trained: bool = True
    ) -> tuple[Loads, ...]:
        """The loads of each microbatch on the ranks of `plan`; `batch` is that of the last step.

        If not `trained`, those of the last evaluation.
        """
        division = division or Division(plan.data_size, plan.microbatches)
        seen = self.seen if trained else self.evaluated
        self.seen, self.evaluated = {}, {}
        if not seen:
            return ()
        by_shard, tensor_ranks = self.by_shard if plan.sp else (), plan.mesh.size_of("tp")
        found: list[Loads] = []
        made = 0  # one process makes no pass of a microbatch without rows
        for sizes in division.counts(batch):
            some = any(sizes)
            own = {name: passes[made] if some else passes[0][:0] for name, passes in seen.items()}
            found.append(_loads([*sizes], own, by_shard, tensor_ranks))
            made += some
        return tuple(found)


def _loads(
    sizes: list[int], seen: Mapping[str, Tensor], by_shard: Collection[str], tensor_ranks: int
) -> Loads:
    """The loads of a microbatch with so many rows of each data rank, those of the first first."""
    rows = sum(sizes)
    by_row = {
        name: found.view(rows, len(found) // max(1, rows), found.shape[-1])
        for name, found in seen.items()
    }
    choices = {name: _counts(found, sizes) for name, found in by_row.items()}
    positions = next(iter(by_row.values())).shape[1]
    size = -(-positions // tensor_ranks)
    cuts = [slice(rank * size, (rank + 1) * size) for rank in range(tensor_ranks)]
    return Loads(
        tuple(number * positions for number in sizes),
        choices,
        {name: tuple(_counts(by_row[name][:, cut], sizes) for cut in cuts) for name in by_shard},
    )


def _counts(choices_BTE: Tensor, sizes: list[int]) -> Counts:
    """The choices by data rank and expert; each data rank has so many rows."""
    return tuple(tuple(own.sum((0, 1)).tolist()) for own in choices_BTE.split(sizes))


class Routed:
    """The loads of each step of a run, from an oracle that trains on the same batches."""

    def __init__(self, oracle: Oracle | AsyncOracle, plan: Plan, clip: float | None = None) -> None:
        self.oracle, self.plan, self.clip = oracle, plan, clip
        self.choices = Choices(oracle.model)

    def finish(self) -> None:
        """Finish a delayed update."""
        if isinstance(self.oracle, Oracle):
            self.oracle.finish()

    def step(self, batch: Any, seed: int) -> tuple[Loads, ...]:
        """Train the oracle on a global batch; the run draws the same random numbers after it."""
        if not experts_in(self.oracle.model):
            return ()
        torch.manual_seed(seed)
        self.oracle.step(batch, self.clip)
        torch.manual_seed(seed)
        return self.choices.loads(batch, self.plan)
