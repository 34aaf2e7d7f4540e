"""Hooks that gather, free and reduce the units of a model during a pass.

    hook                          event of the order (core/unit_order.py)
    before and after a forward    call, returned
    a gradient at an output       reached
    a gradient of a parameter     complete
    of the root module            begin_forward, begin_backward, end_backward, end_evaluation

The order says what to do at each event, and hooks do it. The row decides what is gathered, freed
and reduced (flat_parameter.py): under `ddp` only reductions are. A pass begins and ends with the
hooks of the root module, or, under a schedule, with `enter` and `leave` around each F, B, I and W.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardwise.comm.move import require_no_transform
from shardwise.comm.transport import Lease
from shardwise.comm.world import World
from shardwise.core.errors import bad
from shardwise.core.reduce_order import Act
from shardwise.core.tools import hook
from shardwise.core.tools.structure import BY_ENGINE, BY_HAND, Structure, graph_break
from shardwise.core.unit_order import CallPlace
from shardwise.flat.flat_parameter import Flat
from shardwise.techniques.data.consensus import Consensus
from shardwise.techniques.data.outputs import Output, scalings_of, tensors_in, watch
from shardwise.techniques.data.units import (
    GradientHooks,
    Pace,
    Products,
    StagedUnits,
    Unit,
    Units,
    order_of,
)

#: What does an act on a unit, where it needs the unit alone.
ACTS: Mapping[str, Callable[[Unit], None]] = {
    "gather": Unit.begin_unshard,
    "wait": Unit.unshard,
    "free": Unit.reshard,
    "free_early": Unit.reshard_before_gradients,
    "close": Unit.close,
    "placeholder": Unit.set_placeholders,
    "reduced": Unit.end_reduce,
    "replicate": Unit.replicate,
    "arrive": Unit.end_reduce,
}


class Data:
    """The units of one model on the data axes, and the hooks that drive them.

    `staged` has the units of a pipeline rank, whose passes begin and end with `enter` and `leave`.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Units,
        pace: Pace,
        consensus: Consensus,
        staged: StagedUnits | None = None,
        world: World | None = None,
    ) -> None:
        self.root, self.pace, self.staged = root, pace, staged
        self.world = world  # of a module in a loop of the program's own
        self.consensus = consensus
        self.units, self.numbered = units, list(units.order)
        for number, unit in enumerate(units.order):
            unit.number = number
        self.places: dict[nn.Parameter, tuple[Unit, Flat, int]] = {}
        self.sync = True  # whether the gradients of this backward pass are the last of the step
        self.see: Callable[[Flat], None] = lambda _: None  # before the sum of a group begins
        #: after a gradient of this pass is in the flat gradient
        self.collects: Callable[[Flat, int], None] | None = None
        self.leave_device: Callable[[Flat], None] = lambda _: None  # before it is copied to a tier
        self.in_step = False  # of an engine: it has begun and not ended; it stays after an error
        self.begins = True  # of a loop of the program's own: its next forward pass begins a step
        self.begun = False  # an engine has begun a forward pass, whose root has not been called
        self.in_root = self.in_loss = False  # the root's forward, an engine's loss function runs
        self.computes_loss = False  # what follows in the program, from a recorded pass
        self.mute = False  # whether gradients of this backward pass count for nothing
        self.handles: list[RemovableHandle | Lease] = []  # of all that is on the model or opened
        flats = [group for unit in units.order for group in unit.groups]
        self.scalings = scalings_of(flats if pace.by_hand else (), consensus.same.doubts)
        self.whole = WeakKeyDictionary[Optimizer, Any]()  # WholeSteps (owners.py)
        self.optimizers = WeakKeyDictionary[Optimizer, int]()  # and `versions` of their states
        self.on_grads = GradientHooks(self.collected)
        frozen = [p for group in flats if not group.trained for p in group.params]
        self.structure = Structure(root, frozen, BY_HAND if pace.by_hand else BY_ENGINE)
        self.trained = [group for unit in units.order for group in unit.trained]
        self.split = any(g.moves_to_rest for unit in units.order for g in unit.groups)
        self.frees = any(unit.reshards for unit in units.order)  # memory, between two uses
        self.order = order_of(self.numbered, flats, pace, staged)
        for unit in self.units.order:
            self._hook(unit)
        if staged is None:
            self._hook_root()

    def _hook(self, unit: Unit) -> None:
        keep = self.handles.append
        for group in unit.trained:
            group.grads.scale = self.pace.scale
            self.places |= {p: (unit, group, i) for i, p in enumerate(group.params)}
            self.handles += [self.on_grads.add(p) for p in group.params]
        acts = partial(self._before, unit), partial(self._after, unit)
        divided = any(group.moves_to_rest for group in unit.groups)  # else it stays gathered
        if self.staged is not None:
            unit.state.stays |= any(module not in self.staged.inside for module in unit.modules)
        if (unit.state.stays and self.staged is not None) or not (divided or self.pace.by_hand):
            return
        before, after = map(graph_break, acts) if divided else (hook.nothing, hook.nothing)
        for module in unit.modules:  # the user's hooks may read weights, so ours come first
            keep(module.register_forward_pre_hook(hook.Hook(self, before), prepend=True))
            keep(module.register_forward_hook(hook.Hook(self, after), always_call=True))

    def _hook_root(self) -> None:
        begin = hook.Hook(self, graph_break(self._before_root))
        end = hook.Hook(self, graph_break(self._after_root))
        before = self.root.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        self.handles += [before, self.root.register_forward_hook(end, always_call=True)]

    def _do(self, acts: Iterable[Act]) -> None:
        for kind, number in acts:
            unit = self.numbered[number]
            match kind:
                case "use":
                    unit.unshard()
                    self.consensus.gathers(number)
                case "reduce":
                    unit.begin_reduce(self.see, last=self.order.sums.sync)
                case "offload":
                    unit.offload(self.leave_device)
                case _:
                    ACTS[kind](unit)

    def require_copyable(self) -> None:
        if self.staged is not None:
            raise hook.no_copy("model in stages")
        if self.split:
            raise hook.no_copy(type(self.root).__name__)

    def begin_step(self) -> None:
        """Begin the forward passes of an engine's step, with rank 0's buffers on every rank."""
        self.free_gradients()
        self.consensus.phase("forward")
        self.consensus.buffers.refresh()

    def free_gradients(self) -> None:
        """Free the memory of gradients that the last step has used and dropped."""
        for group in self.trained:
            group.grads.free()

    # --- under a schedule ---------------------------------------------------------------------

    def end_run(self) -> None:
        self.on_grads.quicken(self.places)
        self._do(self.order.abandon())

    def read_outside(self, params: Iterable[Tensor]) -> None:
        """Keep units of `params` gathered during their stage: glue reads them, without a hook."""
        found = set(params)
        for unit in self.units.order:
            unit.state.stays |= any(p in found for group in unit.groups for p in group.params)

    def enter(self, stage: int, op: str, *, graded: bool) -> None:
        """Begin an F, B, I or W of `stage`; `graded`: I computes a gradient of its input."""
        self._do(self.order.enter(stage, op, graded=graded))

    def leave(self) -> None:
        self._collect_arrived()
        self._do(self.order.leave(recorded=torch.is_grad_enabled()))

    def reduce_stage(self, stage: int) -> None:
        """Begin to reduce a stage's gradients, in the last run of a step."""
        if self.sync:
            self._do(self.order.reduce_stage(stage))

    def reduce_last(self) -> None:
        """Begin the remaining reductions of a step, after its last run."""
        if self.sync:
            self._do(self.order.reduce_last())

    def between_passes(self) -> None:
        """All ranks ask for the state: no loss is being computed, whatever forward passes ran."""
        self.consensus.check()
        self.computes_loss = False

    def compare_ranks(self) -> None:
        """All ranks save or gather the state: compare what they have, and their last step."""
        self.between_passes()
        self.units.take_assigned()
        self.consensus.meet(self.scalings.gradients)

    # --- the gradients of a step ----------------------------------------------------------------

    def arrivals(self) -> Iterator[Unit]:
        """Yield each unit that the update waits for, once its gradients are summed."""
        for act in self.order.arrivals():
            self._do([act])
            if act.kind == "arrive":
                yield self.numbered[act.unit]

    def finish_sums(self) -> None:
        for _ in self.arrivals():
            pass

    # --- reads outside of the calls that gather (reads.py) --------------------------------------

    def open(self, unit: Unit) -> None:
        """Gather `unit` for a read, and keep it until this pass, or the next, ends."""
        if unit.reshards and not unit.opened:
            self.consensus.gathers(unit.number)
        unit.open(self._begin_backward)

    # --- forward ------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Begin a forward pass of the root; of an engine, also of modules that its loss calls."""
        self.begun = not self.pace.by_hand
        self.units.take_assigned()
        self.consensus.phase("forward")
        self.order.begin_forward(recorded=torch.is_grad_enabled())
        self.units.begin_unshard()  # if the user's optimizer has updated them

    def end_evaluation(self) -> None:
        self.begun = False
        self.units.close()
        self._do(self.order.end_evaluation())

    def _before_root(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._in_backward():
            return
        self.in_root = True
        if torch.is_grad_enabled() and self.pace.by_hand:
            self.consensus.see_inputs((args, kwargs))
        if not self.begun:
            # without a gradient, values lent by torch.func.functional_call do no harm
            self.structure.require_unchanged(lent=() if torch.is_grad_enabled() else (Tensor,))
            self.begin_forward()
        self.begun = False
        if self.pace.by_hand and self.begins and module.training and torch.is_grad_enabled():
            self.begins = False
            self.free_gradients()
            self.consensus.buffers.refresh()

    def _before(self, unit: Unit, module: nn.Module, args: Any) -> None:
        unit.before_call()
        self._do(self.order.call(unit.number))
        unit.hide_grads()

    def _after(self, unit: Unit, module: nn.Module, args: Any, out: Any) -> None:
        unit.unhide_grads()
        if self.order.is_around(unit.number):
            return
        recording, in_backward = torch.is_grad_enabled(), self.order.in_backward
        outside = not (self.in_root or in_backward) and self.staged is None
        if recording and not unit.reshards and outside:
            self.computes_loss |= watch(tensors_in(out), self._begin_backward)
        if recording and self.pace.by_hand and not unit.examined:
            unit.require_whole(type(self.root).__name__)
        graded: bool | None = False
        if unit.reshards and not in_backward:
            self.computes_loss |= recording
            graded = self._watch(unit, Output(out))
        unit.ran |= module.training and not in_backward
        ends = module is unit.modules[-1]
        self._do(self.order.returned(unit.number, ends=ends, recorded=recording, graded=graded))

    def _after_root(self, module: nn.Module, args: Any, out: Any) -> Any:
        self.in_root = False
        if self.order.in_backward:
            return None
        if torch.is_grad_enabled():
            self.computes_loss = watch(tensors_in(out), self._begin_backward)
            self.on_grads.expect(self.trained, self._begin_backward)
            return None
        self.consensus.check(all_ranks=False)
        kept = (unit for unit in self.units.order if unit.state.unwatched)
        out = Output.copied(out, [group for unit in kept for group in unit.groups])
        self.end_evaluation()
        if self.pace.by_hand:
            self.units.to_sharded(between_passes=False)
        return out

    def _watch(self, unit: Unit, out: Output) -> bool | None:
        """Gather the unit when a gradient of its output arrives; returns whether one will.

        None if that cannot be seen, or the output is a part of weights, which others use.
        """
        act = partial(self._before_backward, unit, self.order.place)
        graded = torch.is_grad_enabled() and watch(out.tensors, act)
        return None if out.opaque or out.shares(unit.groups) else graded

    # --- backward -----------------------------------------------------------------------------

    def _in_backward(self) -> bool:
        """Whether a backward pass is running; one that raised did not reset the flag."""
        if self.order.in_backward and torch._C._current_graph_task_id() == -1:
            self.abandon()
        return self.order.in_backward

    def abandon(self) -> None:
        """Drop the state that a failed step has left."""
        self.finish_sums()
        self.computes_loss = False
        self.on_grads.arrived.clear()
        if self.staged is not None:
            self.staged.postponed = None
        self._do(self.order.abandon())
        self.units.drop_gradients()

    def _begin_backward(self, *_: Tensor) -> None:
        if self.order.in_backward or self.staged is not None:
            return
        if not (self.pace.by_hand or self.in_step):
            self.abandon()
            raise hook.outside_of_step(type(self.root).__name__)
        if self.split and (self.pace.by_hand or self.frees) and torch.is_grad_enabled():
            raise bad(
                "backward(create_graph=True), or autograd.grad, of a "
                f"{type(self.root).__name__} with sharded parameters",
                "gradients of gradients if every rank holds the full parameters",
                "sw.DDP(module), or the plan word ddp",
            )
        self.consensus.check()
        self.computes_loss = self.begun = False
        self.on_grads.begun()
        self.begins |= self.sync
        if self.pace.by_hand:
            self.consensus.see_loss()
            kept = any(p.grad is not None for group in self.trained for p in group.params)
            self.consensus.same.facts.setdefault("gradients kept from the step before", kept)
        acts = self.order.begin_backward(sync=self.sync)
        self.units.order = [self.numbered[number] for number in self.order.forward]
        self.consensus.phase("backward")
        self._do(acts)
        for group in (group for unit in self.units.order for group in unit.trained):
            group.grads.detach()
            if not self.mute:
                group.grads.show()
        if torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _before_backward(self, unit: Unit, place: CallPlace) -> None:
        self._begin_backward()
        self._do(self.order.reached(unit.number, place))

    def product(self, p: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add left^T right to the gradient of `p` (weight_gradient.py); in I, leave it to W."""
        if self.staged is not None and self.staged.postponed is not None:
            self.staged.postponed.append((p, left, right))
            return
        _, group, index = self.places[p]
        self._begin_backward()
        if not self.mute:
            group.grads.add_product(index, left, right)

    @torch.no_grad()
    def multiply(self, products: Products) -> None:
        """In W: add products to the gradients, last layer first, and free each immediately."""
        while products:
            self.product(*products.pop(0))

    def collected(self, p: nn.Parameter) -> None:
        """Collect the gradient of `p`, which is complete for this pass, and those that arrived."""
        on = self.on_grads
        if self.in_loss:
            raise hook.outside_of_step(type(self.root).__name__, "in the engine's loss function")
        if not self.order.in_backward:
            self._begin_unannounced(p)
        self._collect_arrived()
        if on.order is not None:
            on.order[p] = None
        if on.is_last(p):
            self._collect([p])
        else:  # a hook of the program follows
            on.arrived.append(p)

    def _begin_unannounced(self, *now: nn.Parameter) -> None:
        """Begin a pass that no output has announced, with the gradients that have arrived."""
        earlier = self.on_grads.take_arrived()
        new = {p: p.grad for p in (*earlier, *now) if self.places[p][1].split}
        for p in new:
            p.grad = None  # no earlier piece
        self._begin_backward()
        for p, grad in new.items():
            p.grad = grad if p.grad is None or grad is None else p.grad + grad
        self.on_grads.arrived.extend(earlier)

    def end_pass(self) -> None:
        """Autograd has ended: collect gradients of a pass that nothing has announced."""
        if self.on_grads.arrived:
            self._begin_unannounced()
            self._end_backward()

    def _collect_arrived(self) -> None:
        self._collect(self.on_grads.take_arrived())

    def _collect(self, params: Iterable[nn.Parameter]) -> None:
        lots: dict[Flat, tuple[Unit, list[int]]] = {}
        for unit, group, index in map(self.places.__getitem__, params):
            lots.setdefault(group, (unit, []))[1].append(index)
        for group, (unit, indices) in lots.items():
            if unit.state.complete:  # checkpointed reentrantly
                raise bad(f"two gradients of {unit.name} in one pass", "one", "use_reentrant=False")
            group.grads.collect(indices, mute=self.mute)
            if self.collects is not None:
                for index in indices:
                    self.collects(group, index)
            if self.staged is None:
                unit.state.missing -= len(indices)
                if not unit.state.missing:
                    self._do(self.order.complete(unit.number))

    def _end_backward(self) -> None:
        """End a backward pass: reduce units in which some parameter has no gradient."""
        require_no_transform("a backward pass whose gradients are summed over ranks")
        self._collect_arrived()
        if not self.pace.by_hand:
            self.on_grads.quicken(self.places)
        for group in self.trained:
            group.grads.unshow()
        self._do(self.order.end_backward())
        self.computes_loss = False
        if self.pace.by_hand and self.sync:
            self.consensus.begin(self.scalings)
            self.finish_sums()
            self.consensus.end()
            for unit in self.units.order:
                unit.attach_grads()
            self.scalings.gradients.note()
            self.units.step_in_backward()
