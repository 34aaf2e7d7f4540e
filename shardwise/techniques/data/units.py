"""The units of a model, and the operations on all of them between two passes.

    update     to_sharded: every parameter is this rank's piece     attach_grads: with its gradient
    after it   begin_unshard: gather what the row keeps unsharded   wait: until it is there

During a pass hooks unshard and reshard them one by one (unit_hooks.py). Under a pipeline:

    F B I W s     hooks gather and free the units that stage s uses, one by one
    W s           the weight gradients that I postponed are computed and added
    REDUCE s      all microbatches are done: the reduction of the stage's gradients begins

A parameter that several stages use is reduced with the last REDUCE of them; one that several ranks
hold after all others, in the order of the names.

Our hooks on parameters are among the program's, before or after them:

    autograd adds to p.grad --> the program's hooks see it --> ours takes it (`Data.collected`)

As under torch's DDP they all see the gradient of this rank, in the parameter's own shape, and what
they change is what is reduced.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardwise.comm.move import require_no_transform
from shardwise.core.buffer_sizes import IN_FLIGHT
from shardwise.core.errors import bad
from shardwise.core.reduce_order import UnitState
from shardwise.core.tools.hook import in_backward, others_after, owner, weakly
from shardwise.core.unit_order import UnitOrder
from shardwise.flat.flat_parameter import Flat, State


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

    def keep_open(self) -> None:
        """After an update that has begun to gather it: wait, and keep what the program writes."""
        if any(group.state is State.UNSHARDING for group in self.groups):
            self.unshard()
            self.opened = True

    def require_whole(self, where: str) -> None:
        """Raise InputError if autograd has recorded pieces of these full parameters."""
        self.examined = True
        whole = (p for group in self.trained if group.moves_to_rest for p in group.params)
        for p in (p for p in whole if p.requires_grad):
            node: Any = get_gradient_edge(p).node
            if tuple(node._input_metadata[0].shape) != p.shape:
                raise bad(
                    f"a term of the loss over model.parameters(), computed before a forward pass "
                    f"of a sharded {where}, when they are pieces of this rank",
                    "model.parameters() between model(x) and backward, and model.layer.weight",
                    "out = model(x) first, then the term; torch.no_grad() around what is no term",
                )

    def keep_writes(self) -> None:
        """Keep what the program has written to parameters that were gathered for reads."""
        for group in self.groups if self.opened else ():
            group.keep_writes(of_forward=False)

    def close(self) -> None:
        self.keep_writes()
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
        self.keep_writes()
        for group in self.groups:
            group.to_sharded()

    def before_call(self) -> None:
        if self.reshards:
            require_no_transform(f"{self.name}, whose parameters are gathered for its call")

    def hide_grads(self) -> None:
        """A module is called, with full parameters: take the pieces of gradients off them."""
        for group in self.trained if "torch._dynamo" in sys.modules else ():
            group.grads.hide()

    def unhide_grads(self) -> None:
        for group in self.trained:
            group.grads.unhide()

    def attach_grads(self) -> None:
        """Shard its parameters, and set their gradients: an optimizer may update them."""
        self.to_sharded()
        for group in self.trained:
            group.grads.attach()


class Units:
    """All units, in the order in which a forward pass uses them."""

    def __init__(self, order: Sequence[Unit]) -> None:
        self.order = list(order)
        mark_kept(self.order)

    def take_assigned(self) -> None:
        """Take over what the program has assigned or written to parameters (flat_parameter.py)."""
        for unit in self.order:
            unit.keep_writes()
            for group in unit.groups:
                group.take_assigned()

    def to_sharded(self, *, between_passes: bool = True) -> None:
        """Shard all parameters, before a backward pass except those whose reads it needs."""
        for unit in self.order:
            if between_passes or not unit.recorded:
                unit.close()
                unit.to_sharded()

    def close(self) -> None:
        """Free what was gathered for reads, unless a backward pass needs it."""
        for unit in self.order:
            if unit.opened and not unit.recorded:
                unit.close()

    def drop_gradients(self) -> None:
        for unit in self.order:
            for group in unit.trained:
                group.grads.clear()

    def wait(self) -> None:
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


# --- The units of a pipeline rank -----------------------------------------------------------------

#: Bytes of small gradients that are copied to the flat gradient in one call.
LOT_BYTES: Final = 2**20
#: Weight gradients as products: a weight, and the factors of left^T right (weight_gradient.py).
Products = list[tuple[nn.Parameter, Tensor, Tensor]]


class StagedUnits:
    """The units of the stages that this rank owns.

    units    by stage, the units that the stage uses
    last     the units whose gradients are reduced last, in this order
    inside   modules that only layers call: their hooks see every use of their parameters
    postponed  the products of an I that is running, which W computes; None elsewhere
    """

    def __init__(
        self,
        units: Mapping[int, Sequence[Unit]],
        last: Sequence[Unit],
        inside: Collection[nn.Module],
    ) -> None:
        self.units, self.last, self.inside = dict(units), list(last), inside
        self.postponed: Products | None = None


# --- Our hooks on parameters, among those of the program ------------------------------------------


class _Arrived(list[nn.Parameter]):
    """Parameters whose gradients have arrived; its `append` is a hook without a Python frame."""

    def __init__(self, weakly_of: Callable[[], Any]) -> None:
        super().__init__()
        self.weakly_of = weakly_of  # as of a function made by `weakly`


class GradientHooks:
    """The hooks that collect gradients, and those that begin a backward pass.

    arrived    parameters whose gradients are complete, and not collected yet
    order      in which gradients arrived in the first pass, from which `quicken` decides
    """

    def __init__(self, collected: Callable[[nn.Parameter], None]) -> None:
        self.collected = weakly(collected)
        self.numbers: dict[nn.Parameter, int] = {}  # of our hook on each parameter
        self.arrived = _Arrived(vars(self.collected)["weakly_of"])
        self.order: dict[nn.Parameter, None] | None = {}
        self.begins: list[RemovableHandle] = []

    def add(self, p: nn.Parameter) -> RemovableHandle:
        handle = p.register_post_accumulate_grad_hook(self.collected)
        self.numbers[p] = handle.id
        return handle

    def is_last(self, p: nn.Parameter) -> bool:
        """Whether our hook on `p` is the last; if not, it will be in later passes."""
        hooks: Any = p._post_accumulate_grad_hooks
        own = self.numbers[p]
        if len(hooks) == 1 or next(reversed(hooks)) == own:
            return True
        hooks[own] = hooks.pop(own)
        return False

    def quicken(self, places: Mapping[nn.Parameter, tuple[Unit, Flat, int]]) -> None:
        """After the first pass: call `collected` only for the last of each lot of gradients.

        A lot has LOT_BYTES, or ends a unit. The others are noted, and collected with its last.
        """
        if not self.order:
            return
        order, self.order = self.order, None
        ends, lot_bytes = {places[p][0]: p for p in order}, 0
        for p in order:
            lot_bytes += p.nbytes
            if lot_bytes >= LOT_BYTES or ends[places[p][0]] is p or others_after(p):
                lot_bytes = 0
            else:
                hooks: Any = p._post_accumulate_grad_hooks
                hooks[self.numbers[p]] = self.arrived.append

    def take_arrived(self) -> Iterable[nn.Parameter]:
        arrived = {id(p): p for p in self.arrived}
        self.arrived.clear()
        return arrived.values()

    def expect(self, groups: Iterable[Flat], begin: Callable[..., None]) -> None:
        """Call `begin` before autograd adds to pieces of gradients that are still on parameters.

        A pass usually begins with the model's output, but a loss may come from somewhere else.
        """
        for group in () if self.begins else groups:
            if group.split and group.grads.attached:
                self.begins += before_gradients(
                    (p for p in group.params if p.grad is not None), begin
                )

    def begun(self) -> None:
        while self.begins:
            self.begins.pop().remove()


def order_of(
    units: Sequence[Unit], flats: Iterable[Flat], pace: Pace, staged: StagedUnits | None
) -> UnitOrder:
    """The order of the acts on units."""
    stages = (
        None if staged is None else {s: [u.number for u in own] for s, own in staged.units.items()}
    )
    own = [*flats]
    return UnitOrder(
        [unit.state for unit in units],
        pace.ahead,
        pace.in_flight if staged is None else len(units),
        further=any(flat.grads.further for flat in own),
        offload=any(flat.moves.offload for flat in own),
        stages=stages,
        last=[] if staged is None else [unit.number for unit in staged.last],
    )


def before_gradients(
    params: Iterable[nn.Parameter], begin: Callable[..., None]
) -> list[RemovableHandle]:
    """Call `begin` before autograd adds to the gradient of one of `params`."""
    return [p.register_hook(weakly(begin)) for p in params if p.requires_grad]


def owners(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, Any]]:
    """The parameters of an optimizer that `GradientHooks.add` has hooked, each with its owner."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        for hook in (p._post_accumulate_grad_hooks or {}).values():
            if (data := owner(hook)) is not None:
                yield p, data
