"""The units of a model, and the operations on all of them between two passes.

    update     to_sharded: every parameter is this rank's piece     attach_grads: with its gradient
    after it   begin_unshard: gather what the row keeps unsharded   wait: until it is there

During a pass hooks unshard and reshard them one by one (unit_hooks.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from shardwise.core.arena_slots import IN_FLIGHT
from shardwise.core.errors import bad
from shardwise.core.reduce_order import UnitState
from shardwise.core.tools.hook import in_backward
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.data.gradient_hooks import before_gradients


@dataclass(frozen=True)
class Pace:
    """How far communication runs ahead of computation, and how gradients are scaled.

    ahead      units gathered before they are needed
    in_flight  concurrent reductions, if each holds buffers
    scale      a factor for every collected gradient (for a mean over ranks: 1/n)
    by_hand    the user's own loop updates: each backward pass ends with sharded parameters and
               gradients
    """

    ahead: int = 1
    in_flight: int = IN_FLIGHT
    scale: float = 1.0
    by_hand: bool = True


class Unit:
    """A unit: its flat parameters, and its state during a pass."""

    def __init__(self, name: str, modules: Sequence[nn.Module], groups: Sequence[Flat]) -> None:
        self.name, self.modules, self.groups = name, list(modules), list(groups)
        self.number = 0  # in the order of definition
        self.trained = [group for group in groups if group.trained]
        self.reshards = any(group.reshards for group in groups)
        looks_up = all(type(m) is nn.Embedding for m in modules)
        self.state = UnitState.of(groups, reads_backward=not looks_up)
        self.ran = False  # in a forward pass of training since it was freed
        self.examined = False  # whether autograd was seen to record full parameters
        self.opened = False  # gathered for a read outside of its modules' calls
        self.recorded: list[RemovableHandle] = []  # hooks, if autograd has recorded the read

    def begin_unshard(self) -> None:
        for group in self.groups:
            group.begin_unshard()

    def unshard(self) -> None:
        for group in self.groups:
            group.begin_unshard()
        for group in self.groups:
            group.unshard()

    def open(self, begin_backward: Callable[..., None]) -> None:
        """Gather it for a read outside of its modules' calls, until `close`.

        If autograd records, `begin_backward` is called before a gradient is accumulated.
        """
        self.unshard()
        self.opened = True
        if torch.is_grad_enabled() and not self.recorded:
            params = (p for group in self.trained for p in group.params)
            self.recorded = before_gradients(params, begin_backward)

    def require_whole(self, where: str) -> None:
        """Raise InputError if autograd has recorded pieces of these full parameters."""
        self.examined = True
        for p in (p for group in self.trained for p in group.params if group.moves_to_rest):
            node: Any = get_gradient_edge(p).node
            if tuple(node._input_metadata[0].shape) != p.shape:
                raise bad(
                    f"a term of the loss over model.parameters(), computed before a forward pass "
                    f"of a sharded {where}, when they are pieces of this rank",
                    "model.parameters() between model(x) and backward, and model.layer.weight",
                    "out = model(x) first, and then the term over model.parameters()",
                )

    def close(self) -> None:
        """End the reads."""
        for group in self.groups if self.opened else ():
            group.keep_writes(of_forward=False)
        for handle in self.recorded:
            handle.remove()
        self.opened, self.recorded = False, []
        self.reshard()

    def reshard(self) -> None:
        """Free it, unless it is open for reads."""
        if self.opened:
            return
        ran, self.ran = self.ran, False
        for group in self.groups:
            if ran:
                group.keep_writes()
            group.reshard()

    def reshard_before_gradients(self) -> None:
        """Free gathered parameters; p.data keeps its shape, as gradients may still arrive."""
        if self.opened:
            return
        self.ran = False
        for group in self.groups:
            if group.reshards and not group.is_sharded:
                group.reshard()
                group.set_placeholders()

    def set_placeholders(self) -> None:
        """Give freed parameters their shapes without memory: gradients will arrive."""
        for group in self.groups:
            group.set_placeholders()

    def begin_reduce(self, see: Callable[[Flat], None], *, last: bool) -> None:
        """Begin to reduce the gradients, after `see` of each group.

        Before the `last` pass of a step only those that are reduced in each: experts beside the
        dense layers of a unit may not be.
        """
        for group in (g for g in self.trained if last or g.moves.each_backward):
            see(group)
            group.grads.begin_reduce()

    def end_reduce(self) -> None:
        """Wait for the sum or the copy of the gradients that has begun."""
        for group in self.trained:
            group.grads.end_reduce()

    def replicate(self) -> None:
        """Wait for the reduction, and begin the sums over further axes."""
        for group in self.trained:
            group.grads.end_reduce()
            group.grads.begin_further()

    def offload(self, leave: Callable[[Flat], None]) -> None:
        """Wait for the sums, and begin to copy the gradients, after `leave` of each group."""
        for group in self.trained:
            group.grads.end_reduce()
            leave(group)
            group.grads.begin_offload()

    def to_sharded(self) -> None:
        for group in self.groups:
            group.to_sharded()

    def attach_grads(self) -> None:
        """Shard its parameters, and set their gradients: an optimizer may update them."""
        self.to_sharded()
        for group in self.trained:
            group.grads.attach()


class Units:
    """All units, in the order in which a forward pass uses them."""

    def __init__(self, order: Sequence[Unit]) -> None:
        self.order = list(order)

    def take_assigned(self) -> None:
        """Take over what the program has assigned to parameters (flat_parameter.py)."""
        for group in (group for unit in self.order for group in unit.groups):
            group.take_assigned()

    def to_sharded(self, *, between_passes: bool = True) -> None:
        """Shard all parameters, before a backward pass except those whose reads it needs."""
        for unit in self.order:
            if between_passes or not unit.recorded:
                unit.close()
                unit.to_sharded()

    def drop_gradients(self) -> None:
        """Drop the gradients of a failed step."""
        for unit in self.order:
            for group in unit.trained:
                group.grads.clear()

    def wait(self) -> None:
        """Wait for the gathers that `begin_unshard` started."""
        for unit in self.order:
            if not unit.reshards:
                unit.unshard()

    def step_in_backward(self) -> None:
        """Run the optimizers that torch.distributed.optim._apply_optimizer_in_backward set.

        Drops the gradients afterwards. Raises InputError for sharded parameters.
        """
        for group in (group for unit in self.order for group in unit.trained):
            for p in group.params:
                optimizers = getattr(p, "_in_backward_optimizers", ())
                if optimizers and group.split:
                    raise in_backward("sharded parameters")
                for optimizer in optimizers:
                    optimizer.step()
                if optimizers:
                    p.grad = None

    def begin_unshard(self) -> None:
        """After the update: begin to gather units that stay unsharded, in the order of use."""
        for unit in self.order:
            if not unit.reshards:
                unit.begin_unshard()


def mark_kept(order: Sequence[Unit]) -> None:
    """Mark units around others, which backward needs first and last."""
    for unit in order:
        mine = {m for module in unit.modules for m in module.modules()}
        others = [m for other in order if other is not unit for m in other.modules]
        unit.state.stays = any(m in mine for m in others)
