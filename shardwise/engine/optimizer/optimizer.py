"""The optimizer over shards: any torch.optim class on this rank's blocks, or on tensors it owns.

Its two classes have masters and states, and step, in the memory of the device or the host
(updating.py, which decides when and on which thread) or on a disk (disk_optimizer.py).

A parameter that had no gradient on any rank is left alone, its step count too, exactly as one
process would.

It is a `torch.optim.Optimizer`, so that torch's schedulers take it: it shares `param_groups` with
torch's own optimizer, and the next step uses the rates that a scheduler writes there.  Groups have
the model's parameters; in an update they have runs of them (runs.py).
"""

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.comm.tiers.tiers import Tiers
from shardwise.core.errors import bad
from shardwise.core.tools.arguments import short_repr
from shardwise.core.tools.tree import leaves
from shardwise.engine.optimizer import optimizer_state as groups
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec, is_fused
from shardwise.engine.optimizer.optimizer_state import State
from shardwise.engine.optimizer.owners import Owners
from shardwise.engine.optimizer.runs import Runs, version
from shardwise.engine.precision import HALF
from shardwise.engine.state.box import counts, squares
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.data.same_on_ranks import SameOnRanks, named_parts
from shardwise.techniques.data.units import Units

#: A tensor that an engine keeps between steps: its category, its flat group if any, and itself.
Owned = tuple[str, Flat | None, Tensor]
#: The gradient of a block, if there is any, and for each parameter whether it has one.
Gradient = tuple[Tensor | None, Sequence[bool]]


class Factor(NamedTuple):
    """What gradients are multiplied by; on the device, `skips` is 1.0 to update nothing."""

    value: Tensor | float
    skips: Tensor | None = None


class ShardedOptimizer(Optimizer, ABC):
    """One torch optimizer over the blocks of trained flat groups, on the tiers of their rows.

    `engine.step` drives it.  `running` are updates on a thread of the host that are not visible.
    """

    #: Whether an update streams through buffers.
    streams = False

    def __init__(
        self, spec: OptimizerSpec, flats: Sequence[Flat], tiers: Tiers, units: Units
    ) -> None:
        self.spec, self.flats, self.tiers, self.units = spec, flats, tiers, units
        self.together = spec.together or self.streams  # all flat groups are updated in one call
        self.names = [name for flat in flats for name in flat.names]
        found = {flat: self._master(flat) for flat in flats}
        self.masters = {flat: master for flat, master in found.items() if master is not None}
        self.seen: dict[Flat, Tensor] = {}  # squares of gradients of this step that left the device
        self.shown = defaultdict[Tensor, State](dict)  # what a program reads and writes: `state`
        self.versions: dict[Tensor, int] = {}  # of the states, while they are shown
        self.running: deque[tuple[Future[Any], Sequence[Flat]]] = deque()
        self.owners = Owners(spec.is_whole, flats)
        targets = self.owners.targets.items()
        self.runs = {
            flat: Runs(flat, spec, self.block(flat), {i: p for (of, i), p in targets if of is flat})
            for flat in flats
        }
        for flat in flats:  # classes as Adagrad create their state at once
            self._attach(flat, (None, ()))
        every = [run for runs in self.runs.values() for run in runs.every]
        self.torch = spec.build([(run.group, run.param) for run in every])
        for run in every:
            run.detach()
        for runs in self.runs.values():
            runs.state = self.torch.state
        for number, group in enumerate(self.torch.param_groups):
            own = [(f, i) for f in flats for i, n in enumerate(self.runs[f].groups) if n == number]
            group["params"] = [flat.params[i] for flat, i in own]
            group["param_names"] = [flat.names[i] for flat, i in own]
        super().__init__(self.torch.param_groups, {})
        self.defaults, self.param_groups = self.torch.defaults, self.torch.param_groups
        self.had_states = False
        self.spec_options = [groups.options(group) for group in self.param_groups]
        self.factor: Tensor | float = 1.0  # of the last step

    # --- where masters and states are -----------------------------------------------------------

    @abstractmethod
    def _master(self, flat: Flat) -> Tensor | None:
        """What the update of a flat parameter writes to, if not its shard."""

    @abstractmethod
    def room(
        self, flat: Flat, index: int, key: str, size: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """New memory for a state tensor of a parameter of `flat`, on the state's tier."""

    @abstractmethod
    def loaded(self) -> None:
        """After masters were written from outside: copy them to the weights."""

    @abstractmethod
    def _update(
        self, gradients: Mapping[Flat, Gradient], factor: Factor, own: list[dict[str, Any]]
    ) -> None:
        """Update flat groups from these gradients, with these groups of options."""

    def publish(self, flats: Sequence[Flat]) -> None:
        """Copy updated masters to the tier of their weights, unless the update has done so."""

    def block(self, flat: Flat) -> Tensor:
        """What an update of a flat parameter writes to."""
        return self.masters.get(flat, flat.shard)

    def states(self) -> dict[Tensor, State]:
        """The states by the model's parameters, of those that have one."""
        return {p: s for runs in self.runs.values() for p, s in runs.states().items()}

    @property
    def state(self) -> defaultdict[Tensor, State]:
        """The states by the model's parameters, as those of torch's optimizers, until an update.

        The next update follows what a program writes.
        """
        if not self.versions:
            wait([update for update, _ in self.running])
            self.shown |= self.states()
            self.versions = {p: version(state) for p, state in self.shown.items()}
        return self.shown

    @state.setter
    def state(self, _: object) -> None:
        """Do nothing: torch's constructor sets it."""

    def written(self) -> dict[Tensor, State]:
        """The states that the program, or a checkpoint, has written since they were shown."""
        none = version({})
        states = {p: self.shown.get(p, {}) for p in {**self.shown, **self.versions}}
        return {p: s for p, s in states.items() if version(s) != self.versions.get(p, none)}

    def expose(self) -> None:
        """Before masters and states are read from outside."""

    @torch.no_grad()
    def see(self, flat: Flat) -> None:
        """A reduced gradient is about to leave the device, and its squares will be needed."""
        if flat.grads.gshard is not None and counts(flat):
            self.seen[flat] = squares(flat)

    def squares(self, flats: Sequence[Flat]) -> list[Tensor]:
        """Of the gradients in this rank's blocks, without what others count."""
        own = [flat for flat in flats if flat.grads.gshard is not None and counts(flat)]
        return [self.seen.pop(flat) if flat in self.seen else squares(flat) for flat in own]

    # --- the update ---------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """Raise InputError: `engine.step(batch)` updates."""
        raise bad(
            "engine.optimizer.step()",
            "engine.step(batch), which runs forward, backward and the update; a scheduler on "
            "engine.optimizer steps after it",
            "engine.step(batch), then scheduler.step()",
        )

    @property
    def skips_on_device(self) -> bool:
        fused = all(map(is_fused, self.param_groups))
        return fused and hasattr(self.torch, "_step_supports_amp_scaling")

    @contextmanager
    def step_hooks(self) -> Iterator[None]:
        """Run the program's step hooks before and after an update, which is made inside."""
        for hook in [*self._optimizer_step_pre_hooks.values()]:
            hook(self, (), {})
        yield
        for hook in [*self._optimizer_step_post_hooks.values()]:
            hook(self, (), {})

    def begin(
        self, flats: Sequence[Flat], factor: Factor, *, later: bool = False
    ) -> Callable[[], None]:
        """The update of `flats` from their present gradients, as a function; then `publish`.

        If it runs beside the next step, `later`, it uses the options that the groups have now, and
        the next gradients arrive in other memory.
        """
        self.follow(flats)
        self.factor = factor.value
        self._opt_called = True  # torch's schedulers check that
        grads = {flat: flat.grads for flat in self.flats if flat in flats}
        scaled = isinstance(factor.value, Tensor) or factor.value != 1.0
        for flat, each in grads.items() if scaled else ():
            if each.gshard is not None and self.scales_in_place(flat):
                each.gshard.mul_(factor.value)
        now = {flat: (each.gshard, [*each.used]) for flat, each in grads.items()}
        for each in grads.values() if later else ():
            each.clear()
            each.swap()
        own = [dict(group) for group in self.param_groups] if later else self.param_groups
        return partial(self._update, now, factor, own)

    def scales_in_place(self, flat: Flat) -> bool:
        """Whether an update multiplies the gradient itself, not a copy in 32 bits or a buffer."""
        return not (self.streams or flat.dtype in HALF)

    def _attach(self, flat: Flat, gradient: Gradient, scale: Tensor | float = 1.0) -> None:
        """Let the runs be parts of the block and, if used, of the gradient."""
        block, (values, used) = self.block(flat), gradient
        self.tiers.settle(block)
        if values is not None and flat.dtype in HALF:
            values = values.float().mul_(scale)
        self.runs[flat].part(used)
        for run in self.runs[flat].every:
            run.attach(block, values if used and used[run.indices[0]] else None)

    @contextmanager
    def _stepping(
        self,
        gradients: Mapping[Flat, Gradient],
        own: list[dict[str, Any]],
        factor: Factor | None = None,
    ) -> Iterator[None]:
        """Inside, these groups of torch's optimizer have runs with these gradients, and tensors
        that this rank owns are whole, with gradients times `factor`; at the end all ranks get them.
        """
        for flat, gradient in gradients.items():
            self._attach(flat, gradient, 1.0 if factor is None else factor.value)
        weights = {flat: self.block(flat) for flat in gradients}
        self.owners.collect(weights, None if factor is None else factor.value)
        shown = [group["params"] for group in own]
        runs = [run for flat in gradients for run in self.runs[flat].every]
        self.torch.param_groups = own
        vars(self.torch)["found_inf"] = factor and factor.skips  # which torch's fused kernels read
        try:
            for number, group in enumerate(own):
                group["params"] = [run.param for run in runs if run.group == number]
            yield
        finally:
            vars(self.torch)["found_inf"] = None
            for group, params in zip(own, shown, strict=True):
                group["params"] = params
            for run in runs:
                run.detach()
        self.owners.give(weights)

    def clear(self, flats: Sequence[Flat]) -> None:
        for flat in flats:
            flat.grads.clear()

    @torch.no_grad()
    def follow(self, flats: Sequence[Flat]) -> None:
        """Take over weights of `flats`, and states, that the program has written."""
        for flat in flats:
            flat.take_assigned()
            if flat in self.masters and flat.was_written():
                master, weights = self.masters[flat], flat.shard
                if weights.device != master.device:  # on meta both report the plan's device
                    weights = weights.to(master.device)
                written = weights != master.to(weights.dtype)
                master.copy_(torch.where(written, weights, master))
        self.follow_states()

    def follow_states(self) -> None:
        """Take over the states that the program, or a checkpoint, has written."""
        written = self.written()
        for flat, runs in self.runs.items() if written else ():
            if not written.keys().isdisjoint(flat.params):
                runs.arrange(runs.states() | written)
        self.shown.clear()
        self.versions.clear()

    def eval(self) -> None:
        """Give the model the weights to evaluate and to save, of a schedule-free optimizer.

        All ranks call it. Raises InputError for an optimizer without `eval`.
        """
        self._switch("eval")

    def train(self) -> None:
        """Give the model the weights to train, before the first step and after `eval`."""
        self._switch("train")

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        if not hasattr(self.torch, mode):
            raise bad(
                f"engine.optimizer.{mode}() with {self.spec.kind.__name__}, which has no {mode}()",
                "an optimizer with two sets of weights, as those of the package schedulefree",
                "engine.evaluate(batch), which needs no switch",
            )
        self.follow(self.flats)
        self.units.to_sharded()
        with self._stepping(dict.fromkeys(self.flats, (None, ())), self.param_groups):
            getattr(self.torch, mode)()
        self.loaded()
        self.units.begin_unshard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: `engine.step` clears each gradient after its update."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise InputError: the specification's patterns define the groups."""
        if hasattr(self, "spec_options"):
            raise bad(
                "engine.optimizer.add_param_group",
                "groups in the optimizer's specification, by patterns of parameter names",
                'sw.AdamW(lr=3e-4, groups={"head.*": {"lr": 1e-3}})',
            )
        super().add_param_group(param_group)

    def skip(self) -> None:
        """Record a skipped update (fp16 overflow), after which a scheduler may step."""
        self._opt_called = True

    def state_dict(self) -> dict[str, Any]:
        """The options of the groups (rates, betas), without tensors; `sw.save` keeps both."""
        own = [{"name": g["name"], **groups.options(g), "params": []} for g in self.param_groups]
        return {"state": {}, "param_groups": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the options of the groups. Raises InputError for groups of another spec."""
        saved_groups: Any = state_dict
        try:
            names: Any = [group["name"] for group in saved_groups["param_groups"]]
        except (TypeError, KeyError):
            names = short_repr(saved_groups)
        own = [group["name"] for group in self.param_groups]
        if names != own:
            raise bad(
                f"engine.optimizer.load_state_dict with the groups {names}",
                f"the state_dict() of an engine's optimizer with the groups {own}",
                "the same specification, or sw.load(engine, folder), which loads options that fit",
            )
        for group, saved in zip(self.param_groups, saved_groups["param_groups"], strict=True):
            groups.put(group, groups.options(saved))

    def changed(self) -> dict[str, dict[str, Any]]:
        """By group and option, values that differ from the spec: [the spec's value, this one]."""
        found: dict[str, dict[str, Any]] = {}
        for group, first in zip(self.param_groups, self.spec_options, strict=True):
            now = groups.options(group)
            pairs = {k: [first.get(k), v] for k, v in now.items() if first.get(k) != v}
            found |= {group["name"]: pairs} if pairs else {}
        return found

    def load_changed(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the values that `changed` returned, unless this spec has another first value.

        So a schedule continues, and a specification with another rate begins with that rate.  Other
        options are the specification's, also where a scheduler that was made since has set them.
        """
        for group, first in zip(self.param_groups, self.spec_options, strict=True):
            pairs = saved.get(group["name"], {}).items()
            groups.put(group, first | {k: now for k, (was, now) in pairs if first.get(k) == was})

    def compared(self) -> tuple[dict[str, Any], bool]:
        """The options of the groups, which must be equal on all ranks.

        Also whether the program has changed optimizer states since the last update.  Raises
        InputError for an option, of a scheduler or a program, that is no number or not finite.
        """
        found: dict[str, Any] = {}
        for group, first in zip(self.param_groups, self.spec_options, strict=True):
            called = f"the group {group['name']!r} of engine.optimizer"
            groups.require_options(group, first, called)
            found |= groups.compared(group, called)
        left = any(self.shown.values()) if self.versions else self.torch.state
        found["missing states of engine.optimizer"] = self.had_states and not left
        self.had_states = bool(self.torch.state)
        return found, bool(self.written())

    def compare_on(self, same: SameOnRanks) -> None:
        """Let ranks compare masters of 16-bit weights, and states that no other thread writes."""
        compared = [flat for flat in self.flats if not flat.moves.offload]
        half = [flat for flat in compared if flat in self.masters and flat.dtype in HALF]
        name = partial(named_parts, "the fp32 master of ")
        same.add({flat: partial(name, flat, self.masters[flat]) for flat in half})
        same.add({flat: partial(self._named_states, self.runs[flat]) for flat in compared})

    def _named_states(self, runs: Runs) -> Iterator[tuple[str, Tensor]]:
        states = runs.states()
        for name, p in zip(runs.flat.names, runs.flat.params, strict=True):
            for key, value in states.get(p, {}).items():
                if isinstance(value, Tensor):
                    yield f"{key} of {name}", value

    def set_lr(self, lr: float) -> None:
        """Set the learning rate; groups with their own rate keep its proportion."""
        groups.require_rate(lr, " in engine.set_lr")
        default = float(self.torch.defaults["lr"])
        for group, first in zip(self.param_groups, self.spec_options, strict=True):
            group["lr"] = lr * first["lr"] / default if default else lr

    @property
    def lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    def owns(self) -> Iterator[Owned]:
        yield from (("optimizer", flat, master) for flat, master in self.masters.items())
        for run in (run for runs in self.runs.values() for run in runs.every):
            # a copy: the host thread may be creating the state
            state = [*self.torch.state.get(run.param, {}).values()]
            yield from (("optimizer", run.flat, value) for value in leaves(state, Tensor))
