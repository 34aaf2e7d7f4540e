"""The optimizer over shards: any torch.optim class on this rank's pieces, or on tensors it owns.

Its two classes have masters and states, and step, in the memory of the device or the host
(memory_optimizer.py) or on a disk (disk_optimizer.py).  updating.py decides when and on which
thread an update runs.

A parameter that had no gradient on any rank is left alone, its step count too, exactly as one
process would.

It is a `torch.optim.Optimizer`, so that torch's schedulers take it: it shares `param_groups` with
torch's own optimizer, and the next step uses the rates that a scheduler writes there.

    group 0       "default": the parameters that match no pattern of the specification, maybe none
    group k       "name" is its pattern k; the same groups on every rank, some maybe empty
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.tiers.tiers import Tiers
from shardwise.core.errors import bad
from shardwise.core.tools.arguments import short_repr
from shardwise.core.tools.tree import leaves
from shardwise.engine.optimizer import optimizer_state as groups
from shardwise.engine.optimizer.norm import counts, squares
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec, even_out, is_fused
from shardwise.engine.optimizer.owners import Owners
from shardwise.engine.precision import HALF
from shardwise.techniques.data.checksum import versions
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.data.same_on_ranks import SameOnRanks, named_parts

#: A tensor that an engine keeps between steps: its category, its flat group if any, and itself.
Owned = tuple[str, Flat | None, Tensor]
#: What a step of torch's optimizer updates: the number of its group, and the tensor.
Member = tuple[int, nn.Parameter]


class Factor(NamedTuple):
    """What gradients are multiplied by; on the device, `skips` is 1.0 to update nothing."""

    value: Tensor | float
    skips: Tensor | None = None


@contextmanager
def as_pieces(flats: Sequence[Flat]) -> Iterator[None]:
    """Parameters are this rank's pieces inside: classes as Adagrad create their state at once."""
    shown = [(p, p.data) for flat in flats for p in flat.params]
    for flat in (flat for flat in flats if flat.split):
        for i, p in enumerate(flat.params):
            p.data = flat.views.piece(i, flat.shard)
    try:
        yield
    finally:
        for p, data in shown:
            p.data = data


class ShardedOptimizer(Optimizer, ABC):
    """One torch optimizer over the pieces of trained flat groups that this rank updates.

    `masters` are by the number of a flat group; `engine.step` drives it.
    """

    tiers: Tiers
    #: Whether all flat groups are updated in one call.
    together = True
    #: Whether an update multiplies gradients of 32 bits and more in place.
    scales_in_place = True

    def __init__(
        self, spec: OptimizerSpec, flats: Sequence[Flat], masters: Mapping[int, Tensor]
    ) -> None:
        self.spec, self.flats, self.masters = spec, flats, masters
        self.owners = Owners(spec.is_whole, flats)
        self.targets = [self._targets(k, flat) for k, flat in enumerate(self.flats)]
        named = [
            pair
            for flat, targets in zip(self.flats, self.targets, strict=True)
            for pair in zip(flat.names, targets, strict=True)
        ]
        self.names = [name for name, _ in named]
        with as_pieces(self.flats):
            self.torch = spec.build(named)
            super().__init__(self.torch.param_groups, {})
        self.defaults = self.torch.defaults
        self.had_states = False
        self.replaced = False  # whether the program has put states in the place of others
        self.noted = 0  # a number of the states after the last update: see `versions`
        self.param_groups, self.state = self.torch.param_groups, self.torch.state  # shared
        self.spec_options = [groups.options(group) for group in self.param_groups]
        numbered = enumerate(self.param_groups)
        self.group_of = {id(p): number for number, group in numbered for p in group["params"]}
        self.factor: Tensor | float = 1.0  # of the last step

    def _targets(self, k: int, flat: Flat) -> list[nn.Parameter]:
        if k not in self.masters:
            found = list(flat.params)
        else:
            parts = (flat.views.part(i, self.masters[k]) for i in range(len(flat.params)))
            found = [nn.Parameter(part) for part in parts]
        return [self.owners.targets.get((k, i), target) for i, target in enumerate(found)]

    # --- where masters and states are -----------------------------------------------------------

    @abstractmethod
    def begin_update(self, chosen: Sequence[int], factor: Factor) -> Callable[[], None]:
        """The update of flat groups from their gradients of now, each times `factor`."""

    @abstractmethod
    def room(self, k: int, index: int, key: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """New memory for a state tensor of a parameter of the k-th flat, on the state's tier."""

    @abstractmethod
    def loaded(self) -> None:
        """After masters were written from outside: copy them to the weights."""

    def loading(self) -> None:
        """Before a checkpoint is read into masters and states."""

    def expose(self) -> None:
        """Before masters and states are read from outside."""

    def see(self, flat: Flat) -> None:
        """A reduced gradient is about to leave the device, and its squares will be needed."""

    def publish(self, flats: Sequence[Flat]) -> None:
        """Copy updated masters to the tier of their weights, unless the update has done so."""

    def squares(self, flats: Sequence[Flat]) -> list[Tensor]:
        """Of the gradients in this rank's blocks, on their tiers, without what others count."""
        return [squares(f) for f in flats if f.grads.gshard is not None and counts(f)]

    def held(self) -> Iterable[Mapping[str, Any]]:
        """States that only updates of this thread and the program write to."""
        return ()

    def switch(self, mode: str) -> None:
        """Call torch's `optimizer.eval()` or `train()`, which may write to the parameters."""

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

    def update(self, flats: Sequence[Flat], factor: Factor) -> None:
        self.follow(flats)  # not all: others may be becoming pieces in the main thread
        self.torch.param_groups = self.param_groups
        self._begin(flats, factor)()

    def later(self, flats: Sequence[Flat], factor: Factor) -> Callable[[], None]:
        """The update of `flats`, all in host memory, as a function that may run beside a step.

        It uses the options that the groups have now and the present gradients: the next ones arrive
        in other memory.
        """
        self.torch.param_groups = [dict(group) for group in self.param_groups]
        update = self._begin(flats, factor)
        self.clear(flats)
        for flat in flats:
            flat.grads.swap()
        return update

    def _begin(self, flats: Sequence[Flat], factor: Factor) -> Callable[[], None]:
        self.factor = factor.value
        self._opt_called = True  # torch's schedulers check that
        return self.begin_update(self._chosen(flats), factor)

    def _chosen(self, flats: Sequence[Flat]) -> list[int]:
        return [k for k, flat in enumerate(self.flats) if flat in flats]

    def end_update(self, flats: Sequence[Flat]) -> None:
        self.publish(flats)
        self.clear(flats)

    def clear(self, flats: Sequence[Flat]) -> None:
        for flat in flats:
            flat.grads.clear()

    @contextmanager
    def only(self, members: Iterable[Member], skips: Tensor | None = None) -> Iterator[None]:
        """Inside, torch's optimizer has `members` alone, and skips their update by `skips`."""
        groups = self.torch.param_groups
        everyone = [group["params"] for group in groups]
        vars(self.torch)["found_inf"] = skips  # which torch's fused kernels read
        try:
            for group in groups:
                group["params"] = []
            for number, target in members:
                groups[number]["params"].append(target)
            even_out(self.torch)
            yield
        finally:
            vars(self.torch)["found_inf"] = None
            for group, params in zip(groups, everyone, strict=True):
                group["params"] = params

    @torch.no_grad()
    def follow(self, flats: Sequence[Flat]) -> None:
        """Copy weights of `flats` that the program has written to their masters."""
        for k in self._chosen(flats):
            flat = self.flats[k]
            flat.take_assigned()
            if k in self.masters and flat.was_written():
                master, weights = self.masters[k], flat.shard
                if weights.device != master.device:
                    weights = weights.to(master.device)
                written = weights != master.to(weights.dtype)
                master.copy_(torch.where(written, weights, master))

    def eval(self) -> None:
        """Give the model the weights to evaluate and to save, of a schedule-free optimizer.

        All ranks call it. Raises InputError for an optimizer without `eval`.
        """
        self._switch("eval")

    def train(self) -> None:
        """Give the model the weights to train, before the first step and after `eval`."""
        self._switch("train")

    def _switch(self, mode: str) -> None:
        if not hasattr(self.torch, mode):
            raise bad(
                f"engine.optimizer.{mode}() with {self.spec.kind.__name__}, which has no {mode}()",
                "an optimizer with two sets of weights, as those of the package schedulefree",
                "engine.evaluate(batch), which needs no switch",
            )
        self.follow(self.flats)
        self.torch.param_groups = self.param_groups
        self.switch(mode)

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
        if isinstance(saved_groups, Mapping):
            saved_groups = state_dict.get("param_groups")
        listed = isinstance(saved_groups, list) and all(isinstance(g, dict) for g in saved_groups)
        names: Any = [g.get("name") for g in saved_groups] if listed else short_repr(saved_groups)
        own = [group["name"] for group in self.param_groups]
        if names != own:
            raise bad(
                f"engine.optimizer.load_state_dict with the groups {names}",
                f"the state_dict() of an engine's optimizer with the groups {own}",
                "the same specification, or sw.load(engine, folder), which loads options that fit",
            )
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            groups.put(group, groups.options(saved))

    def changed(self) -> dict[str, dict[str, Any]]:
        """By group and option, values that differ from the spec: [the spec's value, this one]."""
        return groups.changed(self.param_groups, self.spec_options)

    def load_changed(self, saved: dict[str, dict[str, Any]]) -> None:
        groups.take_changed(self.param_groups, self.spec_options, saved)

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
        found["missing states of engine.optimizer"] = self.had_states and not self.state
        self.had_states = bool(self.state)
        changed, self.replaced = self.replaced, False
        return found, changed or (bool(self.noted) and self._noted() != self.noted)

    def note(self) -> None:
        """An update has ended: states that change from now on are changed by the program."""
        self.noted = self._noted()

    def _noted(self) -> int:
        held = [*self.held()]
        return len(self.state) + versions(held) if any(held) else 0

    def compare_on(self, same: SameOnRanks) -> None:
        """Let ranks compare masters of 16-bit weights, and states that no other thread writes."""
        compared = [k for k, flat in enumerate(self.flats) if not flat.moves.offload]
        half = [k for k in compared if k in self.masters and self.flats[k].dtype in HALF]
        name = partial(named_parts, "the fp32 master of ")
        same.add({(f := self.flats[k]): partial(name, f, self.masters[k]) for k in half})
        same.add({self.flats[k]: partial(self._named_states, k) for k in compared})

    def _named_states(self, k: int) -> Iterator[tuple[str, Tensor]]:
        for name, target in zip(self.flats[k].names, self.targets[k], strict=True):
            for key, value in self.state.get(target, {}).items():
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
        """Every tensor that is kept for the update."""
        yield from (("optimizer", self.flats[k], master) for k, master in self.masters.items())
        for flat, targets in zip(self.flats, self.targets, strict=True):
            # a copy: the host thread may be creating the state
            states = [list(self.state.get(target, {}).values()) for target in targets]
            yield from (("optimizer", flat, value) for value in leaves(states, Tensor))
