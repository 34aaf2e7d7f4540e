"""Options of the optimizers of a pipe's stages: the ranks of `sw.Pipe` compare them now and then.

A call sends nothing that all ranks sum, so the second call of every EVERY that train sums a number:
0 if all ranks have the same options (techniques/data/same_on_ranks.py).  On a GPU the next call
reads it, which waits for nothing.
"""

from collections.abc import Iterable
from typing import Any, Final
from weakref import finalize

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.comm.move import begin_sum
from shardwise.comm.tiers.host_numbers import HostNumbers, doubles_on
from shardwise.comm.world import Axis
from shardwise.core.tools.weak import weakly
from shardwise.techniques.data import same_on_ranks
from shardwise.techniques.data.same_on_ranks import SameOnRanks
from shardwise.wrap.plain_optimizer import options_of, require_gradients

_HASHES: Final = 2**20


class PipeOptions:
    """What the optimizers of this rank's stages stepped with since the last comparison."""

    def __init__(self, params: Iterable[nn.Parameter], axis: Axis, device: torch.device) -> None:
        self.axis, self.device, self.calls = axis, device, 0
        self.trained = {id(p) for p in params if p.requires_grad}
        nowhere = Axis("none")
        self.same = SameOnRanks((nowhere, nowhere), (), _HASHES, device)
        self.same.others, self.same.options = [axis], {} if self.trained else None
        self.unread: HostNumbers | None = None
        self.computes_loss = False  # after a call that trains, until its backward pass
        handle = register_optimizer_step_pre_hook(weakly(self.record))
        self.remove = finalize(self, handle.remove)

    def record(self, optimizer: Optimizer, *_: Any) -> None:
        """A hook before every optimizer step."""
        groups = optimizer.param_groups
        if any(id(p) in self.trained for group in groups for p in group["params"]):
            self.same.stepped(type(optimizer).__name__, options_of(optimizer))
            if self.computes_loss:
                require_gradients(optimizer)

    def compare(self) -> None:
        """A call that trains begins, on all ranks.  Raises InputError on all if options differ."""
        self.computes_loss = True
        if self.calls % same_on_ranks.EVERY == 1:
            self.same.difference(self.calls)
            with self.axis.ledger.phase("check"):
                own = doubles_on([0], self.device) + self.same.difference_on_others()
                self.unread = HostNumbers(begin_sum(own, self.axis), self.device)
        due = self.unread is not None and (
            self.unread.ready or self.calls % same_on_ranks.EVERY != 1
        )
        self.calls += 1
        if self.unread is not None and due:
            numbers, self.unread = self.unread, None
            if numbers.read()[0]:
                self.same.require()
