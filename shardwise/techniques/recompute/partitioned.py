"""Partitioned activation checkpointing: the inputs of recomputed modules, split over tensor ranks.

    forward     x [B, T, D], the same on all n ranks ---> rank r keeps elements r N/n to (r+1) N/n
    backward    all-gather of the pieces ---> x ---> the module's forward again

Each rank keeps an n-th of x, in place of one of n equal copies, for one all-gather in backward.
If x is already a shard (sequence parallelism), it is kept unchanged and nothing is sent.
With `recompute:partitioned-host` or `activations:host` the pieces rest in host memory
(host_activations.py).
(P_a and P_a+cpu of Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 6.1.)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.comm.move import move
from shardwise.comm.world import Axis
from shardwise.core.layouts.layout import I, S
from shardwise.core.tools.tree import mapped
from shardwise.techniques.recompute.host_activations import HostActivations


class _Kept(NamedTuple):
    """What is kept of a tensor.

    `held` is a tensor, or what stands for it in host memory; of a `shape`, it has this rank's
    elements of a tensor of this shape, padded to the same number on each rank.
    """

    held: Any
    trained: bool
    shape: torch.Size | None = None


class Inputs:
    """The arguments of a module: as given for its first forward, then put together for each other.

    With an `axis` tensors that a gradient reaches are kept in pieces, and others whole, since
    several modules may share them.  With `host` what is kept rests there: the pieces, or all
    tensors where there is no axis.  With `keep` what a gradient reaches is copied by it.
    """

    def __init__(
        self,
        axis: Axis | None,
        given: Any,
        host: HostActivations | None = None,
        keep: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.axis, self.host, self.keep = axis, host, keep
        self.given: Any = given
        self.kept: Any = None

    def take(self) -> Any:
        """The arguments."""
        given, self.given = self.given, None
        if given is None:
            return mapped(self._whole, self.kept, _Kept, objects=True)
        self.kept = mapped(self._keep, given, Tensor, objects=True)
        return given

    def _keep(self, x: Tensor) -> _Kept:
        rests = self.host.keep if self.host is not None else self.keep or _same
        if not x.requires_grad and (self.axis is not None or self.keep is not None):
            return _Kept(x, False)
        if self.axis is None:
            return _Kept(rests(x.detach()), x.requires_grad)
        flat = x.detach().reshape(-1)
        padded = functional.pad(flat, (0, -len(flat) % self.axis.size))
        return _Kept(rests(move(padded, self.axis, I, S(0))), True, x.shape)

    def _whole(self, kept: _Kept) -> Tensor:
        x = HostActivations.read(kept.held)
        if kept.shape is not None and self.axis is not None:
            x = move(x, self.axis, S(0), I)[: kept.shape.numel()].view(kept.shape)
        return x.detach().requires_grad_() if kept.trained else x


def _same(x: Tensor) -> Tensor:
    return x
