"""When things happen to the units of a model: gathered, used, freed, reduced.

    forward     gather 0 | use 0, gather 1 | free 0, use 1, gather 2 | ...      path 0 1 2 .. k
    backward    ... | use 2, gather 1, reduce 3 | use 1, gather 0, reduce 2 | ...     k .. 2 1 0

Hooks call four moments of each unit:

    before forward     free the one before, gather it, begin to gather the next `ahead` ones
    after forward      keep it, for it may be the last, which backward wants at once
    before backward    gather it again, begin to gather the ones before it
    gradients complete free it, begin to sum its gradients (reducer.py)

What is gathered, freed or reduced is the business of the row (flat_parameter.py); for `ddp` three
of the four moments do nothing.  At most `ahead` + 1 units are whole beyond those in use.

A pass begins and ends with the hooks of the root module, or, under a schedule, with `enter` and
`leave` around each F, B, I and W.  There the unit used last stays whole until another is used, so
that a B right after its F finds it whole; gradients are reduced when their stage is done
(staged_hooks.py); and what a stage reads outside of its layers is whole while the rank is in it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from shardwise.core.errors import bad
from shardwise.core.graph_break import graph_break
from shardwise.core.hook import Hook, no_copy, nothing
from shardwise.core.use_order import Way
from shardwise.core.weak import weakly
from shardwise.parallel.data.consensus import Facts
from shardwise.parallel.data.flat_parameter import Flat
from shardwise.parallel.data.reducer import Reductions
from shardwise.parallel.data.staged_hooks import PutOff, StagedUnits
from shardwise.parallel.data.units import Unit, Units, mark_kept


@dataclass(frozen=True)
class Pace:
    """How far communication runs ahead of computation, and what becomes of gradients.

    ahead      units gathered before they are needed
    in_flight  sums of gradients under way at once, where each holds buffers
    scale      every gradient is multiplied by it as it is collected (a mean over ranks: 1/n)
    by_hand    nobody but the user's own loop follows: after each backward pass gradients are
               on the parameters and parameters at rest
    """

    ahead: int = 1
    in_flight: int = 2
    scale: float = 1.0
    by_hand: bool = True


class Data:
    """The units of one model on the data axes, and the hooks that drive them.

    `staged` are those of a rank of a pipeline: passes then begin and end as its schedule says.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Units,
        pace: Pace,
        sums: Reductions,
        facts: Facts,
        staged: StagedUnits | None = None,
    ) -> None:
        self.root, self.pace, self.staged = root, pace, staged
        self.sums, self.facts = sums, facts
        self.units = units
        for number, unit in enumerate(units.order):
            unit.number = number
        self.places: dict[nn.Parameter, tuple[Unit, Flat, int]] = {}
        self.ways = {stage: Way[Unit]() for stage in (staged.units if staged else (0,))}
        self.stage = next(iter(self.ways))  # the one that is computed
        self.reads = True  # whether this backward pass reads weights
        self.halved = False  # whether it makes gradients of inputs or of weights alone
        self.latest: Unit | None = None  # that was used: whole until another is
        self.in_backward = False
        self.mute = False  # whether gradients of this backward pass count for nothing
        self.handles: list[RemovableHandle] = []  # of everything that is hung on the model
        self.frozen = [p for u in units.order for g in u.groups if not g.trained for p in g.params]
        self.split = any(group.split for unit in units.order for group in unit.groups)
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
                keep(p.register_post_accumulate_grad_hook(weakly(self.collected)))
        acts = partial(self._before, unit), partial(self._after, unit)
        divided = any(group.split for group in unit.groups)  # else whole at all times
        if self.staged is not None:
            unit.keep |= any(module not in self.staged.inside for module in unit.modules)
            if unit.keep or not divided:
                return
        before, after = map(graph_break, acts) if divided else (nothing, nothing)
        for module in unit.modules:  # hooks of the user's may read weights, so ours come first
            keep(module.register_forward_pre_hook(Hook(self, before), prepend=True))
            keep(module.register_forward_hook(Hook(self, after), always_call=True))

    def _hook_root(self) -> None:
        begin = Hook(self, graph_break(self._before_root))
        end = Hook(self, graph_break(self._after_root))
        self.handles.append(self.root.register_forward_pre_hook(begin, prepend=True))
        self.handles.append(self.root.register_forward_hook(end))

    @property
    def way(self) -> Way[Unit]:
        """The order in which the stage that is computed uses its units."""
        return self.ways[self.stage]

    def require_copyable(self) -> None:
        """Raise InputError where this rank has only a part of the values (core/hook.py)."""
        if self.staged is not None:
            raise no_copy("model in stages")
        if self.split:
            raise no_copy(type(self.root).__name__)

    @property
    def frees(self) -> bool:
        """Whether any unit's memory is given back between two uses."""
        return any(unit.temporary for unit in self.units.order)

    # --- under a schedule ---------------------------------------------------------------------

    def begin_run(self, *, training: bool = True) -> None:
        """A run of the schedule begins."""
        assert self.staged is not None
        self.staged.begin()
        if training:
            self.facts.phase("forward")
            self.facts.buffers.refresh()

    def end_run(self) -> None:
        """A run of the schedule is over: no unit is whole."""
        self.latest = None
        self.units.free()

    def read_outside(self, params: Iterable[Tensor]) -> None:
        """These are read outside of layers too, which no hook sees: whole while in their stage."""
        found = set(params)
        for unit in self.units.order:
            unit.keep |= any(p in found for group in unit.groups for p in group.params)

    def enter(self, stage: int, op: str, *, reads: bool = True) -> None:
        """An F, B, I or W of `stage` begins; `reads`: it computes with the weights themselves."""
        assert self.staged is not None
        own = self.staged.units[stage]
        for unit in self.units.order if stage != self.stage else ():
            if unit not in own:
                unit.free()
        self.stage, self.in_backward, self.reads, self.halved = stage, op != "F", reads, op in "IW"
        self.way.over = True
        around = [unit for unit in own if unit.keep]
        for unit in around:
            unit.begin_gather()
        for unit in around:
            unit.gather()
        if op == "F":
            return
        if reads:
            self._free_latest(self.way.once[-1] if self.way.once else None)
        for unit in own:
            unit.missing, unit.complete = unit.expected, False
        for group in (group for unit in own if not reads for group in unit.groups):
            group.pretend()  # gradients are coming for it

    def leave(self) -> None:
        """The action is over: of the units that its layers use the last one stays whole."""
        assert self.staged is not None
        if not self.in_backward and torch.is_grad_enabled():
            self.way.learn()
        self.in_backward = False
        for unit in self.staged.units[self.stage]:
            unit.depth, unit.used = 0, False
            if unit is not self.latest and not unit.keep:
                unit.free()

    # --- forward ------------------------------------------------------------------------------

    def _before_root(self, module: nn.Module, args: Any) -> None:
        if self._in_backward():
            return
        if any(p.requires_grad for p in self.frozen):
            raise bad(
                f"a {type(module).__name__} with a parameter that was frozen when it was laid out "
                "and is trained now",
                "the same parameters trained for as long as the layout lasts",
                "requires_grad_(True) before the wrapping, and lr=0 for a group until it is wanted",
            )
        self.facts.phase("forward")
        self.way.over |= not torch.is_grad_enabled()
        self.units.publish()  # where somebody else has updated them
        if module.training and torch.is_grad_enabled():
            self.facts.buffers.refresh()

    def _before(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if self._around(unit):
            return
        begins = unit.temporary and not self.in_backward and not unit.used
        if begins:
            self._free_latest(unit)
        unit.depth += 1
        unit.gather()
        if begins:
            unit.used = True
            self.way.use(unit)
            self.facts.gathers(unit.number)
            for following in self.way.following(self.pace.ahead):
                following.begin_gather()

    def _around(self, unit: Unit) -> bool:
        """Whether the unit is whole for as long as its stage is computed."""
        return self.staged is not None and unit.keep

    def _free_latest(self, now: Unit | None) -> None:
        """What was used before `now` is not the last."""
        before, self.latest = self.latest, None
        if before is not None and before is not now:
            before.free()

    def _after(self, unit: Unit, module: nn.Module, args: Any, out: Any) -> None:
        if self._around(unit):
            return
        unit.depth -= 1
        recording = torch.is_grad_enabled()
        if recording and unit.temporary and not self.in_backward:
            unit.reached = self._watch(out, partial(self._before_backward, unit))
        over = unit.depth == 0 and module is unit.modules[-1] and not self.in_backward
        if over and not recording:
            unit.free()
        elif over and not unit.keep:
            self._free_latest(unit)
            self.latest = unit

    def _after_root(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.in_backward:
            return
        if torch.is_grad_enabled():
            self._watch(out, self._begin_backward)
            return
        self.way.over = True
        if self.pace.by_hand:
            self.units.rest()

    def _learn(self) -> None:
        """Backward begins: the next forward takes the same way."""
        if self.way.learn() and len(self.way.once) == len(self.units.order):
            self.units.order = self.way.once

    def uses(self, unit: Unit) -> tuple[int, int]:
        """How often a training pass gathers `unit`, forward and backward, as the last did."""
        way = self.way.path or self.units.order
        times = way.count(unit)
        again = times > 0 and unit.wanted_backward and not unit.keep and unit is not way[-1]
        return times, int(again)

    def _watch(self, out: Any, act: Callable[[], None]) -> bool:
        """Call `act` when a gradient of `out` arrives; whether one ever will."""
        return bool([x.register_hook(lambda _: act()) for x in tensors_in(out) if x.requires_grad])

    # --- backward -----------------------------------------------------------------------------

    def _in_backward(self) -> bool:
        """Whether a backward pass is going on; one that raised has left without saying so."""
        if self.in_backward and torch._C._current_graph_task_id() == -1:
            self.abandon()
        return self.in_backward

    def abandon(self) -> None:
        """A step broke off: what it left of gradients is dropped, so that the next begins clean."""
        self.sums.finish()
        self.in_backward, self.latest = False, None
        if self.staged is not None:
            self.staged.waiting = []
        self.units.drop()

    def _begin_backward(self) -> None:
        if self.in_backward or self.staged is not None:
            return
        freed = self.split and (self.pace.by_hand or self.frees)
        if freed and torch.is_grad_enabled():
            raise bad(
                "backward(create_graph=True), or autograd.grad, of a "
                f"{type(self.root).__name__} of whose parameters each rank holds a part",
                "gradients that are differentiated in turn where every rank holds the parameters",
                "sw.DDP(module), or the plan word ddp",
            )
        self.in_backward = True
        self._learn()
        self.sums.begin()
        self.facts.phase("backward")
        for unit in self.units.order:
            unit.missing, unit.complete = unit.expected, False
            if not unit.temporary:
                unit.gather()  # at rest only where this graph is gone through a second time
            for group in unit.trained:
                group.hide_grads()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _before_backward(self, unit: Unit) -> None:
        if self._around(unit) or not self.reads:
            return
        self._begin_backward()
        order = self.way.once if unit in self.way.once else self.units.order
        place = order.index(unit)
        for later in order[place + 1 :]:
            # of units that read the same input, one may be reached before another's gradients come
            over = self.halved or later.complete or not later.trained
            if over and not later.keep and later.depth == 0:
                later.free()
        if self.staged is not None:
            self.latest = unit
        if unit.complete:
            return
        if not unit.wanted_backward:
            for group in unit.groups:
                group.pretend()
            return
        unit.gather()
        for earlier in order[max(0, place - self.pace.ahead) : place][::-1]:
            if earlier.wanted_backward and earlier.reached and not earlier.complete:
                earlier.begin_gather()

    def product(self, p: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add left^T right to the gradient of `p` (fused_linear.py)."""
        _, group, index = self.places[p]
        self._begin_backward()
        if not self.mute:
            group.add_product(index, left, right, self.pace.scale)

    def rows(self, p: nn.Parameter, ids: Tensor, grad: Tensor) -> None:
        """Add `grad` to the rows `ids` of the gradient of `p` (fused_linear.py)."""
        _, group, index = self.places[p]
        self._begin_backward()
        if not self.mute:
            group.add_rows(index, ids, grad, self.pace.scale)

    def put_off(self, p: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """In I: a product for W, which `multiply` adds."""
        assert self.staged is not None, "a whole backward pass puts nothing off"
        self.staged.waiting.append((p, left, right))

    @torch.no_grad()
    def multiply(self, products: PutOff) -> None:
        """In W: add them to the gradients, the last layer's first; each is let go of at once."""
        products.reverse()
        while products:
            self.product(*products.pop())

    def collected(self, p: nn.Parameter) -> None:
        """Take what autograd left on `p`: all of its gradient in this pass is there."""
        unit, group, index = self.places[p]
        self._begin_backward()
        if unit.complete and self.staged is None:  # checkpointed reentrantly
            raise bad(f"two gradients of {unit.name} in one pass", "one", "use_reentrant=False")
        p.grad = None if self.mute else p.grad
        group.collect(index, self.pace.scale)
        unit.missing -= 1
        unit.complete = unit.missing == 0
        if unit.complete and self.staged is None:
            if len(unit.trained) == len(unit.groups):  # what is frozen may still be read
                unit.free()
            self.sums.go_on(self.units.order)

    def _end_backward(self) -> None:
        """Autograd is done: what had no gradient for some parameter is reduced now."""
        self.sums.end(self.units.order)
        self.units.free()
        self.in_backward = False
        if self.pace.by_hand and self.sums.sync:
            self.sums.finish()
            self.facts.hear(self.facts.agree(self.facts.got()))
            self.units.show()
            self.units.step_in_backward()


def tensors_in(out: Any, deep: int = 2) -> Iterator[Tensor]:
    """The tensors of a module's output, in containers, dataclasses and plain objects."""
    for leaf in tree_leaves(out):
        if isinstance(leaf, Tensor):
            yield leaf
        elif deep and is_dataclass(leaf):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)], deep - 1)
        elif deep and not isinstance(leaf, nn.Module | type):
            yield from tensors_in(list(getattr(leaf, "__dict__", {}).values()), deep - 1)
