"""Dispatch and combine: tokens go to the ranks of their experts, and the results come back.

    N  tokens of this rank      D  width      E  experts, E / n of them on each of n `ep` ranks

    rows by expert        rank 0:  a a | b       rank 1:  a | b b b      experts a on 0, b on 1
    dispatch              rank 0:  a a a         rank 1:  b b b b        all-to-all with counts
    by expert, computed
    combine               rank 0:  a a | b       rank 1:  a | b b b      the same, counts swapped

The backward pass has two all-to-alls too. While a dispatch is under way, in both directions, the
layer computes the experts that all tokens share. All ranks know the counts from the routing; a rank
without rows takes part with none.

`torch.nn.functional.grouped_mm` multiplies the rows of all experts at once: 3 products instead of
3 E, and 9 instead of 9 E with the backward pass (benchmarks/results/experts.toml).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.comm.link_times import begin_rows
from shardwise.comm.world import Axis
from shardwise.techniques.expert.routing import GlobalBatch, Routing


@dataclass(frozen=True)
class Exchange:
    """The rows that one rank sends to, and receives from, the ranks of its `ep` axis.

    choices    the computed ones of this rank's N*K choices, by expert
    sent_rows  how many go to each rank
    blocks     [n, E / n] the rows received, by rank and then by expert
    """

    ep: Axis
    choices: Tensor
    sent_rows: list[int]
    blocks: Tensor

    @classmethod
    def of(
        cls, routing: Routing, batch: GlobalBatch, ep: Axis, peers: tuple[int, ...]
    ) -> "Exchange":
        """For this data rank; `peers` are the data ranks of its `ep` axis."""
        loads_RE, rank = routing.loads, batch.rank
        experts = loads_RE.shape[1]
        key = torch.where(routing.positions >= 0, routing.experts, experts).flatten()
        choices = torch.argsort(key, stable=True)[: int(loads_RE[rank].sum())]
        by_rank = loads_RE[list(peers)].view(ep.size, ep.size, -1)  # from, to, expert
        sent = loads_RE[rank].view(ep.size, -1).sum(1).tolist()
        return cls(ep, choices, sent, by_rank[:, ep.rank])

    @property
    def received_rows(self) -> list[int]:
        return self.blocks.sum(1).tolist()

    @property
    def rows_by_expert(self) -> list[int]:
        return self.blocks.sum(0).tolist()

    def dispatch(self, rows: Tensor) -> Tensor:
        """From rows by expert to the rows of this rank's experts, by expert."""
        return self.begin_dispatch(rows)()

    def begin_dispatch(self, rows: Tensor) -> Callable[[], Tensor]:
        arrive = begin_rows(rows, self.ep, self.received_rows, self.sent_rows)
        if self.ep.size == 1:
            return arrive
        return lambda: arrive().index_select(0, self._order(rows.device))

    def combine(self, rows: Tensor) -> Tensor:
        if self.ep.size > 1:
            rows = rows.index_select(0, self._order(rows.device).argsort())
        return begin_rows(rows, self.ep, self.sent_rows, self.received_rows)()

    def _order(self, device: torch.device) -> Tensor:
        """The place of each row by expert among the rows as received, which are by rank."""
        experts = self.blocks.shape[1]
        expert = torch.arange(experts, dtype=torch.int64, device="cpu").repeat(len(self.blocks))
        return expert.repeat_interleave(self.blocks.flatten()).argsort(stable=True).to(device)


# --- the feed-forward networks of experts -------------------------------------------------------

#: From so many experts on grouped products are not slower.
LEAST: Final = 8
#: Rows and matrices begin at multiples of so many bytes, or torch refuses them.
ALIGNED_BYTES: Final = 16
#: Stacked weights gate, up [E, F, D] and down [E, D, F].
Stacks = tuple[Tensor, Tensor, Tensor]


def feed_forward(rows: Tensor, counts: list[int], stacks: Stacks) -> Tensor:
    """down(silu(gate x) * up x) of rows by expert, [N, D]; without rows, gradients are zeros."""
    of = grouped if fits(rows, stacks) else looped
    return of(rows, counts, stacks)


def fits(rows: Tensor, stacks: Stacks) -> bool:
    """Whether grouped products apply and are not slower, also in a recomputation. Not under
    dispatch modes, which expect the usual operations, nor for tensors without data.
    """
    if len(stacks[0]) < LEAST or not len(rows) or rows.is_meta:
        return False
    if torch._C._len_torch_dispatch_stack():
        return False
    same = all(p.dtype == rows.dtype and p.is_contiguous() for p in stacks)
    widths = (p.shape[-1] * p.element_size() for p in stacks)
    places = (p.data_ptr() for p in stacks)
    aligned = not any(number % ALIGNED_BYTES for number in (*widths, *places))
    return same and aligned and has_grouped_products(rows.device.type, rows.dtype)


@lru_cache(maxsize=64)
def has_grouped_products(device: str, dtype: torch.dtype) -> bool:
    """Whether this torch multiplies groups of this dtype on such a device, backward too."""
    with _disable_current_modes(), torch.enable_grad():
        x = torch.ones(2, 16, device=device, dtype=dtype, requires_grad=True)
        weight = torch.ones(2, 16, 16, device=device, dtype=dtype, requires_grad=True)
        try:
            made = _product(x, weight, torch.tensor([1, 2], device=device, dtype=torch.int32))
            torch.autograd.grad(made, (x, weight), torch.ones_like(made))
        except (RuntimeError, NotImplementedError):  # not for this dtype or this device
            return False
    return True


def looped(rows: Tensor, counts: list[int], stacks: Stacks) -> Tensor:
    """One expert after the other."""
    made = [
        functional.linear(
            functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down
        )
        for x, gate, up, down in zip(rows.split(counts), *stacks, strict=True)
    ]
    return torch.cat(made)


def grouped(rows: Tensor, counts: list[int], stacks: Stacks) -> Tensor:
    gate, up, down = stacks
    ends = torch.tensor(counts, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
    ends = ends.to(rows.device)
    hidden = functional.silu(_product(rows, gate, ends)) * _product(rows, up, ends)
    return _Dense.apply(_product(hidden, down, ends))


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return functional.grouped_mm(x, weight.mT, offs=ends)


class _Dense(torch.autograd.Function):
    """The same tensor; its gradient is made contiguous, which the backward product needs."""

    @staticmethod
    def forward(_: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()
