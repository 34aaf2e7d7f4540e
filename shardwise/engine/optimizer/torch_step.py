"""A step of an optimizer of torch over some of its parameters, which are pieces on this rank."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.techniques.data.flat.flat_parameter import Flat


@contextmanager
def as_pieces(flats: Sequence[Flat]) -> Iterator[None]:
    """Parameters are this rank's pieces inside: some classes (Adagrad) make their state at once."""
    shown = [(p, p.data) for flat in flats for p in flat.params]
    for flat in (flat for flat in flats if flat.split):
        for i, p in enumerate(flat.params):
            p.data = flat.views.piece(i, flat.shard)
    try:
        yield
    finally:
        for p, data in shown:
            p.data = data


def step_over(optimizer: Optimizer, members: Sequence[list[nn.Parameter]]) -> None:
    """Torch's own step over `members`, the parameters to update of each group."""
    everyone = [group["params"] for group in optimizer.param_groups]
    try:
        for group, params in zip(optimizer.param_groups, members, strict=True):
            group["params"] = params
        optimizer.step()
    finally:
        for group, params in zip(optimizer.param_groups, everyone, strict=True):
            group["params"] = params


def even_out(optimizer: Optimizer, members: Sequence[list[nn.Parameter]]) -> None:
    """Give all momenta of a fused SGD their zeros, which is how they begin in any case.

    Those of `members`, the parameters to update of each group.

    The kernel takes a list with all of them or none; which parameters have had a gradient
    differs.  (With dampening the first momentum is not the damped sum with zero: not fused.)
    """
    if not isinstance(optimizer, torch.optim.SGD) or not optimizer.defaults.get("fused"):
        return
    for group, params in zip(optimizer.param_groups, members, strict=True):
        for p in params if group["momentum"] else ():
            state = optimizer.state[p]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(p)
