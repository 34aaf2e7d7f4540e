"""The routing of a batch of tokens: which experts compute which token, and with which weight.

    N  tokens of this rank      K  choices per token
    E  experts                  R  data ranks

Each of a token's K choices takes the next place in the queue of its expert, over the global batch
(of one microbatch): all first choices in the order of the tokens, then all second ones (GShard,
arXiv 2006.16668, section 2.2). An expert of capacity C computes the choices in its places 0 to C-1;
the others are dropped, and the token has only the residual stream for them.

The tokens of data rank 0 come first, then those of rank 1, and so on, which is the order of the
rows of the batch, so one process computes the same. On the meta device, where the choices are
unknown, the loads are those that the global batch states beforehand, or even.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from shardwise.comm.move import all_gather, move
from shardwise.comm.world import Axis
from shardwise.core.layouts.layout import P, R
from shardwise.core.layouts.uneven import Counts


def phase() -> str:
    """The phase of a move: a forward pass inside of a backward pass recomputes."""
    return "backward" if torch._C._current_graph_task_id() != -1 else "forward"


@dataclass(frozen=True)
class GlobalBatch:
    """The data axes, outermost first; none: this process has the whole batch.
    On the meta device `counts` has the rows of all data ranks, in each microbatch.
    """

    axes: tuple[Axis, ...] = ()
    counts: Sequence[Counts] = field(default=(), compare=False)

    @property
    def ranks(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def rank(self) -> int:
        rank = 0
        for axis in self.axes:
            rank = rank * axis.size + axis.rank
        return rank

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over the data ranks; backward sums gradients, since losses are parts."""
        for axis in self.axes:
            x = move(x, axis, P, R)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Every data rank's `x`, as [ranks, *x.shape]."""
        x = x.detach()
        for axis in reversed(self.axes):
            x = torch.stack(all_gather(x, axis))
        return x.reshape(self.ranks, *x.shape[len(self.axes) :])

    def assumed(self, tokens: int) -> tuple[int, ...]:
        """The tokens of all data ranks, where this one has so many and nobody answers: in
        proportion to their rows, or as many if its own microbatches differ.
        """
        known = [rows for rows in self.counts if len(rows) == self.ranks and rows[self.rank]]
        if len({rows[self.rank] for rows in known}) != 1:
            return (tokens,) * self.ranks
        rows = max(known, key=max)
        return tuple(tokens * n // rows[self.rank] for n in rows)


#: Integers of `pack_facts`, which a data rank sends beside the counts of its choices.
FACT_COUNT: Final = 3
#: The bits of the flags among them.
FINITE: Final = 1
VALID: Final = 2


@dataclass(frozen=True)
class RoutingFacts:
    """Facts of the logits of the global batch.

    sizes    by data rank, the number of tokens
    finite   by data rank, whether all logits are finite
    entropy  of the softmax of a token's logits, in nats: the mean over the tokens
    valid    by data rank, whether every assigned expert exists
    """

    sizes: tuple[int, ...] = ()
    finite: tuple[bool, ...] = ()
    entropy: float = 0.0
    valid: tuple[bool, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(self.sizes)

    @classmethod
    def of(cls, packed_RT: Tensor) -> "RoutingFacts":
        sizes, flags, _ = packed_RT.t().tolist()
        summed = float(packed_RT[:, -1].contiguous().view(torch.float64).sum())
        finite, valid = (tuple(bool(flag & bit) for flag in flags) for bit in (FINITE, VALID))
        return cls(tuple(sizes), finite, summed / max(1, sum(sizes)), valid)


@dataclass(frozen=True)
class Routing:
    """Where each token goes.

    experts    [N, K] the expert of each choice
    weights    [N, K] by which the expert's output is multiplied. Differentiable
    positions  [N, K] the place in the expert's queue over the global batch; -1: not computed
    loads      [R, E] how many choices of each data rank each expert computes, on the host
    wanted     [E] how many choices of the global batch each expert had before any was dropped
    dropped    choices of the global batch beyond the capacity
    losses     auxiliary losses by name, of the global batch, without their coefficients
    """

    experts: Tensor
    weights: Tensor
    positions: Tensor
    loads: Tensor
    wanted: Tensor
    dropped: int
    facts: RoutingFacts = RoutingFacts()
    losses: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Queues:
    """The places of choices in the queues of the experts; other fields as in `Routing`."""

    positions: Tensor
    loads: Tensor
    wanted_by_choice: Tensor  # [K, E] choices of the global batch, kept or not
    dropped: int
    facts: RoutingFacts


def capacity_of(factor: float | None, choices: int, experts: int) -> int | None:
    """C = ceil(factor * choices / experts), of the choices of the global batch; None: no bound."""
    return None if factor is None else math.ceil(factor * choices / experts)


def queues(
    choices: tuple[Tensor, Tensor],
    logits_NE: Tensor,
    factor: float | None,
    batch: GlobalBatch,
    valid: Tensor | None = None,
) -> Queues:
    """Line up choices: experts [N, K], and which of them are wanted [N, K].

    One all-gather of K*E + 3 numbers, called by all data ranks.
    factor: the capacity of an expert, in multiples of its share under an even load; None: no bound.
    valid: without dims, whether the experts given to this rank exist; None: none were given.
    """
    (experts_NK, wanted_NK), (_, experts) = choices, logits_NE.shape
    n, k = experts_NK.shape
    if logits_NE.is_meta:
        batch.gather(logits_NE.new_empty(k * experts + FACT_COUNT, dtype=torch.int64))
        return _assumed_queues(experts_NK, experts, batch)
    choice = torch.arange(k, dtype=torch.int64, device=experts_NK.device)
    key = (choice * experts + experts_NK).t().flatten()
    key = torch.where(wanted_NK.t().flatten(), key, k * experts)  # those not wanted: the last queue
    counts = torch.bincount(key, minlength=k * experts + 1)
    order = torch.argsort(key, stable=True)
    within = torch.empty_like(key)
    place = torch.arange(n * k, dtype=torch.int64, device=key.device)
    within[order] = place - (counts.cumsum(0) - counts)[key[order]]

    counts = counts[:-1]
    everyone = batch.gather(torch.cat([counts, pack_facts(logits_NE, valid)])).cpu()
    known = RoutingFacts.of(everyone[:, -FACT_COUNT:])
    counts_RKE = everyone[:, :-FACT_COUNT].view(-1, k, experts)
    slots_KE = counts_RKE.sum(0)
    first_RKE = _sum_before(slots_KE) + _sum_before(counts_RKE)

    capacity = capacity_of(factor, known.tokens * k, experts)
    kept_RKE = counts_RKE
    if capacity is not None:
        kept_RKE = (capacity - first_RKE).clamp(min=0).minimum(counts_RKE)
    first = first_RKE[batch.rank].flatten().to(key.device)
    places = within + torch.cat([first, first.new_zeros(1)])[key]
    lost = key == k * experts
    if capacity is not None:
        lost |= places >= capacity
    positions_NK = torch.where(lost, -1, places).view(k, n).t()
    dropped = int(counts_RKE.sum() - kept_RKE.sum())
    return Queues(positions_NK, kept_RKE.sum(1), slots_KE, dropped, known)


def pack_facts(logits_NE: Tensor, valid: Tensor | None = None) -> Tensor:
    """FACT_COUNT integers of a data rank: tokens, flags, and the bits of the sum of entropies."""
    logits_NE = logits_NE.detach()
    rows = torch.tensor(len(logits_NE), dtype=torch.int64, device=logits_NE.device)
    entropy = torch.special.entr(logits_NE.double().softmax(-1)).sum()
    flags = FINITE * torch.isfinite(logits_NE).all() + VALID * (True if valid is None else valid)
    return torch.stack([rows, flags, entropy.view(torch.int64)])


def gather_facts(logits_NE: Tensor, batch: GlobalBatch) -> RoutingFacts:
    """The facts of all data ranks. One all-gather of FACT_COUNT numbers."""
    if logits_NE.is_meta:
        batch.gather(logits_NE.new_empty(FACT_COUNT, dtype=torch.int64))
        return RoutingFacts(batch.assumed(len(logits_NE)), (True,) * batch.ranks)
    return RoutingFacts.of(batch.gather(pack_facts(logits_NE)).cpu())


def even_counts(choices: int, experts: int) -> Tensor:
    """So many choices, spread over the experts: [E], the first have one more.
    Without `torch.arange`, which under `cp` may be asked for positions (context/operations.py).
    """
    more = torch.tensor(range(experts - 1, -1, -1), dtype=torch.int64, device="cpu")
    return (choices + more) // experts


def _assumed_queues(experts_NK: Tensor, experts: int, batch: GlobalBatch) -> Queues:
    """The queues of choices on the meta device: every data rank has as many tokens."""
    (n, k), ranks = experts_NK.shape, batch.ranks
    loads = even_counts(n * k, experts).expand(ranks, -1)
    wanted_KE = torch.stack([even_counts(ranks * n, experts) for _ in range(k)])
    positions = torch.empty_like(experts_NK, device="meta")
    facts = RoutingFacts((n,) * ranks, (True,) * ranks)
    return Queues(positions, loads, wanted_KE, 0, facts)


def _sum_before(counts: Tensor) -> Tensor:
    return counts.cumsum(0) - counts
