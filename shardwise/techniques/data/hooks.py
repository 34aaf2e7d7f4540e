"""Hooks that gather, free and reduce the units of a model during a pass.

    forward     gather 0 | use 0, gather 1 | free 0, use 1, gather 2 | ...      path 0 1 2 .. k
    backward    ... | use 2, gather 1, reduce 3 | use 1, gather 0, reduce 2 | ...     k .. 2 1 0

Hooks act at four moments of each unit:

    before forward     free the previous unit, gather it, begin to gather the next `ahead` units
    after forward      keep it: if it is the last unit, backward needs it immediately
    before backward    gather it again, begin to gather the units before it
    gradients complete free it, begin to sum its gradients (reducer.py)

The row decides what is gathered, freed and reduced (flat_parameter.py); for `ddp` three of the four
moments do nothing.  At most `ahead` + 1 units are whole beyond those in use.

A pass begins and ends with the hooks of the root module, or, under a schedule, with `enter` and
`leave` around each F, B, I and W.  Then the unit used last stays whole until another is used: a B
right after its F need not gather it.  Parameters that a stage reads outside its layers stay whole
while it runs, and gradients are reduced when it is done (staged_hooks.py).
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardwise.comm.transport import Lease
from shardwise.comm.world import World
from shardwise.core.errors import bad
from shardwise.core.graph_break import graph_break
from shardwise.core.hook import Hook, in_backward, no_copy, nothing, others_after, outside_of_step
from shardwise.core.structure import BY_ENGINE, BY_HAND, Structure
from shardwise.core.use_order import UseOrder
from shardwise.techniques.data.consensus import Consensus
from shardwise.techniques.data.flat_parameter import Flat
from shardwise.techniques.data.gradient_hooks import GradientHooks
from shardwise.techniques.data.outputs import Output, shares_memory, tensors_in, watch
from shardwise.techniques.data.pace import Pace
from shardwise.techniques.data.reducer import Reductions
from shardwise.techniques.data.scaling import Scaling
from shardwise.techniques.data.staged_hooks import PutOff, StagedUnits
from shardwise.techniques.data.units import Unit, Units, mark_kept


class Data:
    """The units of one model on the data axes, and the hooks that drive them.

    `staged` has the units of a pipeline rank, whose passes begin and end with `enter` and `leave`.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Units,
        pace: Pace,
        sums: Reductions,
        consensus: Consensus,
        staged: StagedUnits | None = None,
        world: World | None = None,
    ) -> None:
        self.root, self.pace, self.staged = root, pace, staged
        self.world = world  # of a module in a loop of the program's own
        self.sums, self.consensus = sums, consensus
        self.units = units
        for number, unit in enumerate(units.order):
            unit.number = number
        self.places: dict[nn.Parameter, tuple[Unit, Flat, int]] = {}
        self.use_orders = {stage: UseOrder[Unit]() for stage in (staged.units if staged else (0,))}
        self.stage = next(iter(self.use_orders))  # the stage that is being computed
        self.reads = True  # whether this backward pass reads weights
        self.latest: Unit | None = None  # that was used: whole until another is
        self.in_backward = False
        self.in_step = False  # of an engine: it has begun and not ended; it stays after an error
        self.in_root = False  # a forward pass of the root is running
        self.records = False  # and autograd recorded when it began
        self.computes_loss = False  # what follows in the program, from a recorded pass
        self.mute = False  # whether gradients of this backward pass count for nothing
        self.handles: list[RemovableHandle | Lease] = []  # of all that is on the model or opened
        flats = [group for unit in units.order for group in unit.groups]
        self.scaling = Scaling(flats if pace.by_hand else (), consensus.axes)
        self.optimizers = WeakSet[Optimizer]()  # that have stepped on pieces (plain_optimizer.py)
        self.on_grads = GradientHooks()
        frozen = [p for group in flats if not group.trained for p in group.params]
        self.structure = Structure(root, frozen, BY_HAND if pace.by_hand else BY_ENGINE)
        self.trained = [group for unit in units.order for group in unit.trained]
        self.split = any(g.moves_to_rest for unit in units.order for g in unit.groups)
        mark_kept(self.units.order)
        for unit in self.units.order:
            self._hook(unit)
        if staged is None:
            self._hook_root()

    def _hook(self, unit: Unit) -> None:
        keep = self.handles.append
        for group in unit.trained:
            for index, p in enumerate(group.params):
                self.places[p] = unit, group, index
                keep(self.on_grads.add(p, self.collected))
        acts = partial(self._before, unit), partial(self._after, unit)
        # otherwise it stays gathered on the device
        divided = any(group.moves_to_rest for group in unit.groups)
        if self.staged is not None:
            unit.stays_unsharded |= any(module not in self.staged.inside for module in unit.modules)
            if unit.stays_unsharded or not divided:
                return
        before, after = map(graph_break, acts) if divided else (nothing, nothing)
        for module in unit.modules:  # the user's hooks may read weights, so ours come first
            keep(module.register_forward_pre_hook(Hook(self, before), prepend=True))
            keep(module.register_forward_hook(Hook(self, after), always_call=True))

    def _hook_root(self) -> None:
        begin = Hook(self, graph_break(self._before_root))
        end = Hook(self, graph_break(self._after_root))
        self.handles.append(self.root.register_forward_pre_hook(begin, prepend=True))
        self.handles.append(self.root.register_forward_hook(end, always_call=True))

    @property
    def use_order(self) -> UseOrder[Unit]:
        """The order in which the current stage uses its units."""
        return self.use_orders[self.stage]

    def require_copyable(self) -> None:
        """Raise InputError if this rank has only a part of the values (core/hook.py)."""
        if self.staged is not None:
            raise no_copy("model in stages")
        if self.split:
            raise no_copy(type(self.root).__name__)

    @property
    def frees(self) -> bool:
        """Whether the memory of any unit is freed between two uses."""
        return any(unit.reshards for unit in self.units.order)

    # --- under a schedule ---------------------------------------------------------------------

    def begin_run(self, *, training: bool = True) -> None:
        """Begin a run of the schedule."""
        assert self.staged is not None
        self.staged.begin()
        if training:
            self.consensus.phase("forward")
            self.consensus.buffers.refresh()

    def end_run(self) -> None:
        """End a run of the schedule: free all units."""
        self.latest = None
        self.units.reshard()

    def read_outside(self, params: Iterable[Tensor]) -> None:
        """Keep units of `params` gathered during their stage: glue reads them, without a hook."""
        found = set(params)
        for unit in self.units.order:
            unit.stays_unsharded |= any(p in found for group in unit.groups for p in group.params)

    def enter(self, stage: int, op: str, *, reads: bool = True) -> None:
        """Begin an F, B, I or W of `stage`; `reads` says whether it reads weights."""
        assert self.staged is not None
        own = self.staged.units[stage]
        for unit in self.units.order if stage != self.stage else ():
            if unit not in own:
                unit.reshard()
        self.stage, self.in_backward, self.reads = stage, op != "F", reads
        self.use_order.ended = True
        around = [unit for unit in own if unit.stays_unsharded]
        for unit in around:
            unit.begin_unshard()
        for unit in around:
            unit.unshard()
        if op == "F":
            return
        if reads:
            last = next(iter(self.use_order.backward_calls), None)
            self._reshard_latest(last if last is not None and last.wanted_backward else None)
        for group in (group for unit in own if not reads for group in unit.groups):
            group.set_placeholders()  # it will get gradients

    def leave(self) -> None:
        """End the action; of the units that its layers used, only the last stays gathered."""
        assert self.staged is not None
        if not self.in_backward and torch.is_grad_enabled():
            self.use_order.begin_backward()
        for p in self.on_grads.take_late():
            self._collect(p)
        self.in_backward = False
        for unit in self.staged.units[self.stage]:
            unit.depth, unit.used = 0, False
            if unit is not self.latest and not unit.stays_unsharded:
                unit.reshard()

    def between_passes(self) -> None:
        """All ranks ask for the state: no loss is being computed, whatever forward passes ran."""
        self.consensus.check()
        self.computes_loss = False

    # --- reads outside of the calls that gather (reads.py) --------------------------------------

    def open(self, unit: Unit) -> None:
        """Gather `unit` for a read, and keep it until this pass, or the next, ends."""
        if unit.reshards and not unit.opened:
            self.consensus.gathers(unit.number)
        unit.open(self._begin_backward)

    # --- forward ------------------------------------------------------------------------------

    def _before_root(self, module: nn.Module, args: Any) -> None:
        if self._in_backward():
            return
        self.in_root, self.records = True, torch.is_grad_enabled()
        # without a gradient, values lent by torch.func.functional_call do no harm
        self.structure.require_unchanged(lent=() if torch.is_grad_enabled() else (Tensor,))
        self.units.take_assigned()
        self.consensus.phase("forward")
        self.use_order.ended |= not torch.is_grad_enabled()
        self.units.begin_unshard()  # if the user's optimizer has updated them
        if module.training and torch.is_grad_enabled():
            self.consensus.buffers.refresh()

    def _before(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if self._around(unit):
            return
        begins = unit.reshards and not self.in_backward and not unit.used
        if begins:
            self._reshard_latest(unit)
        unit.depth += 1
        unit.unshard()
        if begins:
            unit.used = True
            self.use_order.use(unit)
            self.consensus.gathers(unit.number)
            for following in self.use_order.following(self.pace.ahead):
                following.begin_unshard()
        elif unit.reshards and not self.in_backward:
            self.use_order.calls.append(unit)

    def _around(self, unit: Unit) -> bool:  # it stays gathered while its stage runs
        return self.staged is not None and unit.stays_unsharded

    def _reshard_latest(self, now: Unit | None) -> None:
        """Free the unit that was used last, unless it is `now`."""
        before, self.latest = self.latest, None
        if before is not None and before is not now:
            before.reshard()

    def _after(self, unit: Unit, module: nn.Module, args: Any, out: Any) -> None:
        if self._around(unit):
            return
        unit.depth -= 1
        recording = torch.is_grad_enabled()
        outside = not (self.in_root or self.in_backward) and self.staged is None
        if recording and not unit.reshards and outside:
            self.computes_loss |= watch(tensors_in(out), self._begin_backward)
        if unit.reshards and not self.in_backward:
            self.computes_loss |= recording
            self._watch(unit, Output(out))
        unit.ran |= module.training and not self.in_backward
        over = unit.depth == 0 and module is unit.modules[-1] and not self.in_backward
        if over and not recording and not unit.unwatched:
            unit.reshard()
        elif over and unit.reshards and not unit.stays_unsharded:
            self._reshard_latest(unit)
            self.latest = unit

    def _after_root(self, module: nn.Module, args: Any, out: Any) -> None:
        self.in_root = False
        if self.in_backward:
            return
        if torch.is_grad_enabled():
            self.computes_loss = watch(tensors_in(out), self._begin_backward)
            self.on_grads.expect(self.trained, self._begin_backward)
            return
        self.consensus.check(all_ranks=False)
        self.use_order.ended = True
        self.units.end_evaluation(sharded=self.pace.by_hand)

    def _learn(self) -> None:
        """Store the use order of this forward when backward begins, for the next forward."""
        if self.use_order.begin_backward() and len(self.use_order.distinct) == len(
            self.units.order
        ):
            self.units.order = self.use_order.distinct

    def _watch(self, unit: Unit, out: Output) -> None:
        """Gather the unit when a gradient of its output arrives.

        If that cannot be seen, or the output is a part of the unit's weights, which other modules
        use, the unit stays gathered until the end of the pass.
        """
        if torch.is_grad_enabled():
            calls = self.use_order.calls
            act = partial(self._before_backward, unit, calls, len(calls))
            unit.reached = watch(out.tensors, act)
        if out.opaque or shares_memory(out.tensors, (group.full for group in unit.groups)):
            unit.unwatched = unit.stays_unsharded = True

    # --- backward -----------------------------------------------------------------------------

    def _in_backward(self) -> bool:
        """Whether a backward pass is running; one that raised did not reset the flag."""
        if self.in_backward and torch._C._current_graph_task_id() == -1:
            self.abandon()
        return self.in_backward

    def abandon(self) -> None:
        """Drop the state that a failed step has left."""
        self.sums.finish()
        self.in_backward, self.computes_loss, self.latest = False, False, None
        self.on_grads.late = []
        if self.staged is not None:
            self.staged.waiting = []
        self.units.drop()

    def _begin_backward(self, *_: Tensor) -> None:
        if self.in_backward or self.staged is not None:
            return
        if not (self.pace.by_hand or self.in_step):
            self.abandon()
            raise outside_of_step(type(self.root).__name__)
        freed = self.split and (self.pace.by_hand or self.frees)
        if freed and torch.is_grad_enabled():
            raise bad(
                "backward(create_graph=True), or autograd.grad, of a "
                f"{type(self.root).__name__} with sharded parameters",
                "gradients of gradients if every rank holds the full parameters",
                "sw.DDP(module), or the plan word ddp",
            )
        self.consensus.check()
        self.in_backward, self.computes_loss = True, False
        self.on_grads.begun()
        self._learn()
        self.sums.begin()
        self.consensus.phase("backward")
        for unit in self.units.order:
            unit.missing, unit.complete = unit.expected, False
            if not unit.reshards:
                unit.unshard()  # it is sharded only in a second backward pass of the same graph
            for group in unit.trained:
                group.grads.detach()
                if not self.mute:
                    group.grads.show(self.pace.scale)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _before_backward(self, unit: Unit, calls: Sequence[Unit], count: int) -> None:
        """A gradient arrives at the output of a call of `unit`, the `count`-th of `calls`.

        Autograd runs the ready node that was created last. So all nodes of later calls have run,
        and no node reads a unit any more that is in none of the first `count` calls, both in B and
        in I. Gradients of its weights may still arrive: column-parallel layers with one input
        compute them after the input's gradient (Entry.line_up in techniques/tensor/linear.py).
        """
        if self._around(unit) or not self.reads:
            return
        self._begin_backward()
        to_come = list(calls[:count])
        for later in set(calls[count:]).difference(to_come):
            if not later.stays_unsharded and later.depth == 0:
                later.reshard_before_gradients()
        if self.staged is not None:
            self.latest = unit
        if unit.complete:
            return
        if not unit.wanted_backward:
            for group in unit.groups:
                group.set_placeholders()
            return
        unit.unshard()
        if to_come[-1] is unit:
            to_come.pop()
        for earlier in to_come[::-1][: self.pace.ahead]:
            if earlier.wanted_backward and earlier.reached and not earlier.complete:
                earlier.begin_unshard()

    def product(self, p: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add left^T right to the gradient of `p` (weight_gradient.py)."""
        _, group, index = self.places[p]
        self._begin_backward()
        if not self.mute:
            group.grads.add_product(index, left, right, self.pace.scale)

    def put_off(self, p: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """In I: postpone a product to W, in which `multiply` adds it."""
        assert self.staged is not None, "only I postpones products"
        self.staged.waiting.append((p, left, right))

    @torch.no_grad()
    def multiply(self, products: PutOff) -> None:
        """In W: add products to the gradients, last layer first, and free each immediately."""
        products.reverse()
        while products:
            self.product(*products.pop())

    def collected(self, p: nn.Parameter) -> None:
        """Collect the gradient of `p`, which is complete for this pass."""
        new, (_, group, index) = None, self.places[p]
        group.grads.require_whole(index)
        if group.split and not self.in_backward:
            # no output has announced the pass: p.grad is not a piece of an earlier one
            new, p.grad = p.grad, None
        self._begin_backward()
        if new is not None:
            p.grad = new if p.grad is None else p.grad + new
        if self.on_grads.is_last(p):
            self._collect(p)

    def _collect(self, p: nn.Parameter) -> None:
        unit, group, index = self.places[p]
        if p.grad is None and others_after(p):
            raise in_backward(f"a hook that drops the gradient of {group.names[index]}, as")
        if unit.complete:  # checkpointed reentrantly
            raise bad(f"two gradients of {unit.name} in one pass", "one", "use_reentrant=False")
        p.grad = None if self.mute else p.grad
        group.grads.collect(index, self.pace.scale)
        if self.staged is not None:
            return
        unit.missing -= 1
        unit.complete = unit.missing == 0
        if unit.complete:
            if len(unit.trained) == len(unit.groups):  # frozen weights may still be read
                unit.reshard()
            self.sums.go_on(self.units.order)

    def _end_backward(self) -> None:
        """End a backward pass: reduce units in which some parameter has no gradient."""
        for p in self.on_grads.take_late():
            self._collect(p)
        for group in self.trained:
            group.grads.unshow(self.pace.scale)
        self.sums.end(self.units.order)
        self.units.reshard()
        self.in_backward = self.computes_loss = False
        if self.pace.by_hand and self.sums.sync:
            self.consensus.begin(self.scaling)
            self.sums.finish()
            self.consensus.end()
            self.units.attach_grads()
            self.scaling.note()
            self.units.step_in_backward()
