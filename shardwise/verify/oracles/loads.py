"""The loads of experts as one process routes the tokens, by the rows of its batch.

    rows of the global batch    0 1 2 3 | 4 5 6        7 rows on 2 data ranks
    microbatch                  0 0 1 1 | 0 0 1        accumulate:2

The predicted bytes of experts come from these loads, never from the routing of the ranks.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.comm.move import part
from shardwise.core.plan.plan import Plan
from shardwise.techniques.context.positions import cut_of
from shardwise.techniques.expert.apply import experts_in, layers_of
from shardwise.techniques.expert.routing import Routing
from shardwise.techniques.expert.stacked import experts_of, stacked_experts
from shardwise.verify.oracles.async_oracle import AsyncOracle
from shardwise.verify.oracles.batches import Division
from shardwise.verify.oracles.oracle import Oracle

Counts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Loads:
    """What the experts compute of one microbatch.

    choices  by layer: [R][E], how many choices of each data rank each expert computes
    shards   of stacked layers under `sp`: the same by tensor rank, of its shard of the sequence
    """

    choices: Mapping[str, Counts]
    shards: Mapping[str, tuple[Counts, ...]] = field(default_factory=dict[str, tuple[Counts, ...]])

    def on(self, layer: str, tensor_rank: int) -> Counts:
        shards = self.shards.get(layer)
        return self.choices[layer] if shards is None else shards[tensor_rank]


class Choices:
    """The choices of experts for each token in the last training step of `model` in one process."""

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
        """The loads of each microbatch on the ranks of `plan`, in training or in evaluation."""
        division = division or Division(plan.shares, plan.microbatches)
        seen = self.seen if trained else self.evaluated
        self.seen, self.evaluated = {}, {}
        if not seen:
            return ()
        by_shard = self.by_shard if plan.sp else ()
        found: list[Loads] = []
        made = 0  # one process makes no pass of a microbatch without rows
        for sizes in division.counts(batch):
            some = any(sizes)
            own = {name: passes[made] if some else passes[0][:0] for name, passes in seen.items()}
            found.append(_loads([*sizes], own, by_shard, plan))
            made += some
        return tuple(found)


def _loads(
    sizes: list[int], seen: Mapping[str, Tensor], by_shard: Collection[str], plan: Plan
) -> Loads:
    rows, tensor_ranks = sum(sizes), plan.mesh.size_of("tp")
    by_row = {
        name: found.view(rows, len(found) // max(1, rows), found.shape[-1])
        for name, found in seen.items()
    }
    cut = cut_of(next(iter(by_row.values())).shape[1], plan.context)
    own = {
        name: [part(found, cut.on(1), rank) for rank in range(plan.cp)]
        for name, found in by_row.items()
    }
    shards = {name: [_padded(x, tensor_ranks) for x in own[name]] for name in by_shard}
    return Loads(
        {name: _counts(parts, sizes) for name, parts in own.items()},
        {
            name: tuple(_counts([x[:, rank] for x in parts], sizes) for rank in range(tensor_ranks))
            for name, parts in shards.items()
        },
    )


def _padded(choices_BTE: Tensor, ranks: int) -> Tensor:
    """The choices as [B, ranks, T / ranks, E], by the shards of the sequence on tensor ranks."""
    positions = choices_BTE.shape[1]
    size = -(-positions // ranks)
    whole = functional.pad(choices_BTE, (0, 0, 0, size * ranks - positions))
    return whole.unflatten(1, (ranks, size))


def _counts(parts: Sequence[Tensor], sizes: list[int]) -> Counts:
    """The choices by data rank and expert. `parts` has the positions of each rank of `cp`."""
    by_share = zip(*(x.split(sizes) for x in parts), strict=True)
    return tuple(tuple(own.flatten(0, -2).sum(0).tolist()) for each in by_share for own in each)


class Routed:
    """The loads of each step of a run, from an oracle that trains on the same batches."""

    def __init__(self, oracle: Oracle | AsyncOracle, plan: Plan, clip: float | None = None) -> None:
        self.oracle, self.plan, self.clip = oracle, plan, clip
        self.choices = Choices(oracle.model)

    def finish(self) -> None:
        if isinstance(self.oracle, Oracle):
            self.oracle.finish()

    def step(self, batch: Any, seed: int) -> tuple[Loads, ...]:
        """Train the oracle on a global batch. Seeds twice: the run draws the same numbers next."""
        if not experts_in(self.oracle.model):
            return ()
        torch.manual_seed(seed)
        self.oracle.step(batch, self.clip)
        torch.manual_seed(seed)
        return self.choices.loads(batch, self.plan)
