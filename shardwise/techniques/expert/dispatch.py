"""Dispatch and combine: tokens go to the ranks of their experts, and what these make comes back.

    N  tokens of this rank      D  width      E  experts, E / n of them on each of n `ep` ranks

    rows by expert        rank 0:  a a | b       rank 1:  a | b b b      experts a on 0, b on 1
    dispatch              rank 0:  a a a         rank 1:  b b b b        all-to-all with counts
    by expert, computed
    combine               rank 0:  a a | b       rank 1:  a | b b b      the same, counts swapped

The backward pass sends gradients along the same ways: two all-to-alls each way. While a dispatch
is under way, in both directions, the layer computes the experts that all tokens share
(comm/overlap.py).
The counts are known from the routing, on all ranks. A rank without rows takes part with none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shardwise.comm.overlap import begin_rows
from shardwise.comm.world import Axis
from shardwise.techniques.expert.expert_moves import ExpertMove
from shardwise.techniques.expert.global_batch import GlobalBatch, Record, phase, record_nothing
from shardwise.techniques.expert.routing import Routing


@dataclass(frozen=True)
class Exchange:
    """The rows that one rank sends to, and receives from, the ranks of its `ep` axis.

    choices    of the N*K choices of this rank the computed ones, by expert
    sent_rows  how many go to each rank
    blocks     [n, E / n] the rows received, by rank and then by expert
    tokens     of this rank
    record     is called with each move before it is made
    """

    ep: Axis
    choices: Tensor
    sent_rows: list[int]
    blocks: Tensor
    tokens: int = 0
    record: Record = record_nothing

    @classmethod
    def of(
        cls,
        routing: Routing,
        batch: GlobalBatch,
        ep: Axis,
        peers: tuple[int, ...],
        slots: tuple[int, ...] = (),
    ) -> "Exchange":
        """The exchange of this data rank; `peers` are the data ranks of its `ep` axis.

        `slots` are the experts in the order of the ranks that have them, if not in that of their
        numbers. "By expert" then means in this order.
        """
        loads_RE, chosen, rank = routing.loads, routing.experts, batch.rank
        if slots:
            order = torch.tensor(slots, dtype=torch.int64, device=loads_RE.device)
            loads_RE, chosen = loads_RE[:, order], order.argsort().to(chosen.device)[chosen]
        experts = loads_RE.shape[1]
        key = torch.where(routing.positions >= 0, chosen, experts).flatten()
        choices = torch.argsort(key, stable=True)[: int(loads_RE[rank].sum())]
        by_rank = loads_RE[list(peers)].view(ep.size, ep.size, -1)  # from, to, expert
        sent = loads_RE[rank].view(ep.size, -1).sum(1).tolist()
        tokens = len(routing.experts)
        return cls(ep, choices, sent, by_rank[:, ep.rank], tokens, batch.record)

    @property
    def received_rows(self) -> list[int]:
        """How many rows come from each rank."""
        return self.blocks.sum(1).tolist()

    @property
    def rows_by_expert(self) -> list[int]:
        """How many rows each expert of this rank computes."""
        return self.blocks.sum(0).tolist()

    def dispatch(self, rows: Tensor) -> Tensor:
        """From rows by expert to the rows of this rank's experts, by expert."""
        return self.begin_dispatch(rows)()

    def begin_dispatch(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin `dispatch`; returns a function that waits for its result."""
        arrive = self._begin_exchange("dispatch", rows, self.received_rows, self.sent_rows)
        if self.ep.size == 1:
            return arrive
        return lambda: arrive().index_select(0, self._order(rows.device))

    def combine(self, rows: Tensor) -> Tensor:
        """The inverse of `dispatch`."""
        if self.ep.size > 1:
            rows = rows.index_select(0, self._order(rows.device).argsort())
        return self._begin_exchange("combine", rows, self.sent_rows, self.received_rows)()

    def _begin_exchange(
        self,
        kind: Literal["dispatch", "combine"],
        rows: Tensor,
        received: list[int],
        sent: list[int],
    ) -> Callable[[], Tensor]:
        now = phase()
        returns = int(rows.requires_grad and now == "forward")
        size = rows.element_size()
        self.record(ExpertMove(kind, rows.numel(), size, now, returns, self.tokens))
        return begin_rows(rows, self.ep, received, sent)

    def _order(self, device: torch.device) -> Tensor:
        """For each row by expert its place among the rows as received, by rank."""
        experts = self.blocks.shape[1]
        expert = torch.arange(experts, dtype=torch.int64, device="cpu").repeat(len(self.blocks))
        return expert.repeat_interleave(self.blocks.flatten()).argsort(stable=True).to(device)
