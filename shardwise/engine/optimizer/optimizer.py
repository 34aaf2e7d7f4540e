"""The optimizer of an engine: any torch.optim class on this rank's blocks, or on tensors it owns.

`update` steps unit by unit as gradients arrive; all at once after the norm of all gradients is
known (clipping, fp16), and where states stream from a disk, or the class needs whole tensors or
counts its calls.  Under an asynchronous schedule `begin` updates one stage (weight_stashing.py).

States in host memory are updated on a thread of the host; or all beside the next step (the delayed
parameter update of ZeRO-Offload).  Step 4 computes with the parameters that the update of step 2
made:

    main thread    forward 3, backward 3 | publish 2 | forward 4, backward 4 | publish 3 | ...
    host thread    update 2 ............             | update 3 ............             | ...

fp32, fp64    the class steps on this rank's blocks of the flat parameters (flat_parameter.py)
bf16, fp16    it steps on fp32 masters of the blocks, one unit at a time:
              master.grad = gradient in fp32;  step;  block = master in 16 bits
offload       masters (fp32, or the dtype of the weight), their gradients and their states are in
              host memory, where the class steps on them.  Then `publish` copies the updated
              masters to the device, in the dtype of the weight.  Parameters that rest in host
              memory too are updated there, as above.  On a disk, see disk_optimizer.py.

All messages and copies between tiers begin on the main thread, in one order. (ZeRO-Offload, arXiv
2101.06840, sections 4.2 and 5.2.)

A parameter that had no gradient on any rank is left alone, its step count too, exactly as one
process would.

It is a `torch.optim.Optimizer`, so that torch's schedulers take it: it shares `param_groups` with
torch's own optimizer, and the next step uses the rates that a scheduler writes there.  Groups have
the model's parameters; in an update they have runs of them (runs.py).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.agreement.same_on_ranks import SameOnRanks, named_parts
from shardwise.comm.tiers.disk import Disk
from shardwise.comm.tiers.tiers import Tiers, begin_copy
from shardwise.core.errors import bad
from shardwise.core.reduce_order import EARLY_BYTES
from shardwise.core.tools.tree import leaves
from shardwise.engine.optimizer.host_thread import HostThread
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec, is_fused
from shardwise.engine.optimizer.optimizer_state import GroupOptions, State
from shardwise.engine.optimizer.owners import Owners
from shardwise.engine.optimizer.runs import Runs, ShownStates
from shardwise.engine.precision import HALF
from shardwise.engine.state.box import counts, squares
from shardwise.flat.flat_parameter import Flat
from shardwise.techniques.data.units import Unit, Units
from shardwise.techniques.offload.disk_optimizer import StatesOnDisk

#: A tensor that an engine keeps between steps: its category, its flat group if any, and itself.
Owned = tuple[str, Flat | None, Tensor]
#: The gradient of a block, if there is any, and for each parameter whether it has one.
Gradient = tuple[Tensor | None, Sequence[bool]]

#: The bytes of one call on a thread of the host, if all gradients are there.
MOST_BYTES: Final = 2**26


class Factor(NamedTuple):
    """What gradients are multiplied by; on the device, `skips` is 1.0 to update nothing."""

    value: Tensor | float
    skips: Tensor | None = None


class ShardedOptimizer(Optimizer):
    """One torch optimizer over the blocks of trained flat groups, on the tiers of their rows.

    `engine.step` drives it.

    masters      what updates write to, by flat group, where it is not the shard
    early_bytes  units of at least this size together are updated in one call; None: EARLY_BYTES;
                 if all gradients are there, MOST_BYTES on the host, else all
    """

    def __init__(self, spec: OptimizerSpec, units: Units, tiers: Tiers, disk: Disk | None) -> None:
        flats = [flat for unit in units.order for flat in unit.trained]
        self.spec, self.flats, self.tiers, self.units = spec, flats, tiers, units
        self.disk = None if disk is None else StatesOnDisk(spec, flats, tiers, disk)
        self.together = spec.together or disk is not None  # all are updated in one call
        self.on_host = not self.together and any(flat.moves.offload for flat in flats)
        self.early_bytes: int | None = None
        self.host = HostThread(self.publish)
        self.names = [name for flat in flats for name in flat.names]
        found = {flat: self._master(flat) for flat in flats}
        self.masters = {flat: master for flat, master in found.items() if master is not None}
        self.seen: dict[Flat, Tensor] = {}  # squares of gradients of this step that left the device
        self.owners = Owners(spec.is_whole, flats)
        targets = self.owners.targets.items()
        self.runs = {
            flat: Runs(flat, spec, self.block(flat), {i: p for (of, i), p in targets if of is flat})
            for flat in flats
        }
        self.states = ShownStates(self.runs)
        for flat in flats:  # classes as Adagrad create their state at once
            self._attach(flat, (None, ()))
        every = [run for runs in self.runs.values() for run in runs.every]
        self.torch = spec.build([(run.group, run.param) for run in every])
        for run in every:
            run.detach()
        for flat, runs in self.runs.items():
            runs.state = self.torch.state
            runs.blocks = {} if self.disk is None else self.disk.blocks(flat)
        for number, group in enumerate(self.torch.param_groups):
            own = [(f, i) for f in flats for i, n in enumerate(self.runs[f].groups) if n == number]
            group["params"] = [flat.params[i] for flat, i in own]
            group["param_names"] = [flat.names[i] for flat, i in own]
        super().__init__(self.torch.param_groups, {})
        self.defaults, self.param_groups = self.torch.defaults, self.torch.param_groups
        self.options = GroupOptions(self.param_groups, float(self.defaults["lr"]))
        self.had_states = False
        self.factor: Tensor | float = 1.0  # of the last step

    # --- masters and states ---------------------------------------------------------------------

    def _master(self, flat: Flat) -> Tensor | None:
        """A copy of the shard on the tier of its optimizer state, with 32 bits or more."""
        half, rests = flat.dtype in HALF, flat.shard
        if self.disk is not None:
            return self.disk.master(flat)
        if not (half or flat.moves.publish):
            return None
        if not flat.moves.offload:
            return rests.float()
        if not flat.moves.fetch:
            rests = begin_copy(rests, self.tiers, "device", "host").wait()
        return self.tiers.empty(rests.numel(), torch.float32).copy_(rests) if half else rests

    def block(self, flat: Flat) -> Tensor:
        """What an update of a flat parameter writes to."""
        return self.masters.get(flat, flat.shard)

    @property
    def state(self) -> defaultdict[Tensor, State]:
        """The states by the model's parameters, as those of torch's optimizers, until an update.

        The next update follows what a program writes.
        """
        self.host.wait()
        return self.states.show()

    @state.setter
    def state(self, _: object) -> None:
        """Do nothing: torch's constructor sets it."""

    # --- the update ---------------------------------------------------------------------------

    @property
    def skips_on_device(self) -> bool:
        """Whether an update waits for no number, on any rank or on none."""
        waits = self.together or self.on_host or not all(map(is_fused, self.param_groups))
        return not waits and hasattr(self.torch, "_step_supports_amp_scaling")

    def update(
        self, factor: Factor, arriving: Iterable[Unit] | None, *, later: bool = False
    ) -> None:
        """Update units as soon as their gradients are summed, while other sums are under way; all
        at once if `arriving` is None, as all gradients are there.

        Small units are updated together: the overhead of a call exceeds its work on few elements.
        If `later`, updates on the host are made beside the next step.
        """
        later &= self.on_host
        here = not self.on_host or self.tiers.device.type == "meta"
        with self.step_hooks():
            parts = self._parts(arriving, early=not later)
            parts = [*parts] if later else parts
            with self.host.open(here=here, later=later) as make:
                for part in parts:
                    make(self.begin(part, factor, later=later), part)
            if not later:
                self.clear(self.flats)

    def _parts(self, arriving: Iterable[Unit] | None, *, early: bool) -> Iterator[list[Flat]]:
        least_bytes: float = MOST_BYTES if self.on_host else math.inf
        if arriving is not None and early:
            least_bytes = EARLY_BYTES
        least_bytes = math.inf if self.together else self.early_bytes or least_bytes
        part: list[Flat] = []
        for unit in self.units.order if arriving is None else arriving:
            unit.to_sharded()
            part += unit.trained
            if sum(flat.shard.nbytes for flat in part) >= least_bytes:
                yield part
                part = []
        if part:
            yield part

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
        streams = self.disk is not None  # gradients, chunk by chunk
        now = {f: (None if streams else each.gshard, [*each.used]) for f, each in grads.items()}
        for each in grads.values() if later else ():
            each.clear()
            each.swap()
        own = [dict(group) for group in self.param_groups] if later else self.param_groups
        return partial(self._update, now, factor, own)

    def scales_in_place(self, flat: Flat) -> bool:
        """Whether an update multiplies the gradient itself, not a copy in 32 bits or a buffer."""
        return self.disk is None and flat.dtype not in HALF

    def _update(
        self, gradients: Mapping[Flat, Gradient], factor: Factor, own: list[dict[str, Any]]
    ) -> None:
        """Update flat groups from these gradients, with these groups of options: in one call;
        16-bit ones one by one, for their fp32 gradients.
        """
        step = self.torch.step
        if self.disk is not None:
            runs = {flat: self.runs[flat] for flat in gradients}
            step = partial(self.disk.step, self.torch, runs, factor.value)
        half = [flat for flat in gradients if flat.dtype in HALF]
        wide = [flat for flat in gradients if flat not in half]
        parts = [[*gradients]] if self.together else [wide, *([flat] for flat in half)]
        for part in filter(None, parts):
            with self._stepping({flat: gradients[flat] for flat in part}, own, factor):
                step()
            for flat in part:
                self._end_step(flat)

    def _end_step(self, flat: Flat) -> None:
        if self.disk is not None:
            return
        for run in self.runs[flat].every if flat.moves.offload else ():
            for value in leaves(self.torch.state.get(run.param), Tensor):
                self.tiers.own(value)  # a state is where its master is
        if flat in self.masters and not flat.moves.publish:
            self.tiers.settle(flat.shard)
            flat.shard.copy_(self.masters[flat])

    @torch.no_grad()
    def publish(self, flats: Sequence[Flat]) -> None:
        """Copy the masters that are in host memory to weights on the device."""
        for flat in flats if self.disk is None else ():
            if tier := flat.moves.publish:
                source = self.masters[flat]
                if flat.dtype in HALF:
                    source = self.tiers.empty(source.numel(), flat.dtype).copy_(source)
                begin_copy(source, self.tiers, "host", tier, flat.shard).wait()

    @torch.no_grad()
    def loaded(self) -> None:
        """After masters were written from outside: copy them to the weights."""
        self.states.follow()
        if self.disk is not None:
            self.disk.loaded()
        for flat in self.flats:
            self._end_step(flat)
        self.publish(self.flats)

    def expose(self) -> None:
        """Before masters and states are read from outside."""
        if self.disk is not None:
            self.disk.expose()

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
        self, gradients: Mapping[Flat, Gradient], own: list[dict[str, Any]], factor: Factor
    ) -> Iterator[None]:
        """Inside, these groups of torch's optimizer have runs with these gradients, and tensors
        that this rank owns are whole, with gradients times `factor`; at the end all ranks get them.
        """
        for flat, gradient in gradients.items():
            self._attach(flat, gradient, factor.value)
        weights = {flat: self.block(flat) for flat in gradients}
        self.owners.collect(weights, {f: x for f, (x, _) in gradients.items()}, factor.value)
        shown = [group["params"] for group in own]
        runs = [run for flat in gradients for run in self.runs[flat].every]
        self.torch.param_groups = own
        vars(self.torch)["found_inf"] = factor.skips  # which torch's fused kernels read
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

    @torch.no_grad()
    def see(self, flat: Flat) -> None:
        """A reduced gradient is about to leave the device, and its squares will be needed."""
        if flat.grads.gshard is not None and counts(flat):
            self.seen[flat] = squares(flat)

    def squares(self, flats: Sequence[Flat]) -> list[Tensor]:
        """Of the gradients in this rank's blocks, without what others count."""
        own = [flat for flat in flats if flat.grads.gshard is not None and counts(flat)]
        return [self.seen.pop(flat) if flat in self.seen else squares(flat) for flat in own]

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
        self.states.follow()

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
        with self._stepping(dict.fromkeys(self.flats, (None, ())), self.param_groups, Factor(1.0)):
            getattr(self.torch, mode)()
        self.loaded()
        self.units.begin_unshard()

    def step(self, closure: Any = None) -> None:
        """Raise InputError: `engine.step(batch)` updates."""
        raise bad(
            "engine.optimizer.step()",
            "engine.step(batch), which runs forward, backward and the update; a scheduler on "
            "engine.optimizer steps after it",
            "engine.step(batch), then scheduler.step()",
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: `engine.step` clears each gradient after its update."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise InputError: the specification's patterns define the groups."""
        if hasattr(self, "options"):
            raise bad(
                "engine.optimizer.add_param_group",
                "groups in the optimizer's specification, by patterns of parameter names",
                'sw.AdamW(lr=3e-4, groups={"head.*": {"lr": 1e-3}})',
            )
        super().add_param_group(param_group)

    def skip(self) -> None:
        """Record a skipped update (fp16 overflow), after which a scheduler may step."""
        self._opt_called = True
        self.clear(self.flats)

    def state_dict(self) -> dict[str, Any]:
        """The options of the groups (rates, betas), without tensors; `sw.save` keeps both."""
        return self.options.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the options of the groups. Raises InputError for groups of another spec."""
        self.options.load_state_dict(state_dict)

    def compared(self) -> tuple[dict[str, Any], bool]:
        """The options of the groups, which must be equal on all ranks.

        Also whether the program has changed optimizer states since the last update.  Raises
        InputError for an option, of a scheduler or a program, that is no number or not finite.
        """
        left = any(self.states.shown.values()) if self.states.versions else self.torch.state
        missing = {"missing states of engine.optimizer": self.had_states and not left}
        self.had_states = bool(self.torch.state)
        return self.options.compared() | missing, bool(self.states.written())

    def compare_on(self, same: SameOnRanks) -> None:
        """Let ranks compare masters of 16-bit weights, and states that no other thread writes."""
        compared = [flat for flat in self.flats if not flat.moves.offload]
        half = [flat for flat in compared if flat in self.masters and flat.dtype in HALF]
        name = partial(named_parts, "the fp32 master of ")
        same.add({flat: partial(name, flat, self.masters[flat]) for flat in half})
        same.add({flat: self.runs[flat].named_states for flat in compared})

    def owns(self) -> Iterator[Owned]:
        """Masters, states, and the buffers through which states stream from a disk."""
        yield from (("optimizer", flat, master) for flat, master in self.masters.items())
        for run in (run for runs in self.runs.values() for run in runs.every):
            # a copy: the host thread may be creating the state
            state = dict(self.torch.state.get(run.param, {}))
            yield from (("optimizer", run.flat, value) for value in leaves(state, Tensor))
        for flat, runs in self.runs.items():
            yield from (("optimizer", flat, block) for block in runs.blocks.values())
        if self.disk is not None:
            yield "buffers", None, self.disk.disk.memory
