"""The optimizer over shards: any elementwise torch.optim class on this rank's pieces.

    fp32, fp64    the class steps on the user's own parameters at rest (flat_parameter.py)
    bf16, fp16    it steps on fp32 masters of the pieces, one unit at a time:
                      master.grad = p.grad in fp32;  step;  p = master in 16 bits
                  so that a parameter costs 2 (weight) + 2 (gradient) + 12 (master, two moments)
                  bytes, and 4 more for one unit at a time
    offload       masters, in 32 bits or in those of the weight, their gradients and their states
                  are in host memory, where the class steps on them; then `publish` copies the
                  updated masters to the device, in the precision of the weight.  Where parameters
                  rest in host memory too, they are updated there, as above

A parameter that had no gradient on any rank has none here, and is left alone, its step count too,
exactly as one process would.

It is a `torch.optim.Optimizer`, so that torch's schedulers take it: its `param_groups` are those of
torch's own optimizer, and the rates a scheduler writes there are used by the next step.

    group 0       "default": the parameters that match no pattern of the specification, maybe none
    group k       "name" is its pattern k; the same groups on every rank, some maybe empty
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.disk import Disk
from shardwise.comm.tiers import Tiers, begin_copy
from shardwise.core.errors import bad
from shardwise.core.tree import leaves
from shardwise.engine import optimizer_groups as groups
from shardwise.engine.disk_states import DiskStates
from shardwise.engine.norm import counts, squares
from shardwise.engine.optimizer_spec import OptimizerSpec
from shardwise.engine.optimizer_state import device_of
from shardwise.engine.precision import HALF
from shardwise.engine.torch_step import as_pieces, even_out, step_over
from shardwise.parallel.data.flat_parameter import Flat


class ShardedOptimizer(Optimizer):
    """One torch optimizer over the pieces this rank updates; `engine.step` drives it."""

    def __init__(
        self,
        spec: OptimizerSpec,
        flats: Sequence[Flat],
        tiers: Tiers | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.spec, self.flats = spec, [flat for flat in flats if flat.trained]
        self.tiers = tiers or Tiers()
        self.disk = disk and DiskStates(spec, self.flats, self.tiers, disk)
        self.masters: dict[int, Tensor] = {
            k: self._master(k, flat)
            for k, flat in enumerate(self.flats)
            if flat.dtype in HALF or _apart(flat)
        }
        self.targets = [self._targets(k, flat) for k, flat in enumerate(self.flats)]
        named = [
            pair
            for flat, targets in zip(self.flats, self.targets, strict=True)
            for pair in zip(flat.names, targets, strict=True)
        ]
        self.names = [name for name, _ in named]
        with as_pieces(self.flats):
            self.torch = spec.build(named)
            super().__init__(self.torch.param_groups, self.torch.defaults)
        if self.disk is not None:
            self.disk.attach(self.torch, self.targets)
        self.param_groups, self.state = self.torch.param_groups, self.torch.state  # shared
        self.spec_options = [groups.options(group) for group in self.param_groups]
        self.places = places = [{id(p) for p in group["params"]} for group in self.param_groups]
        self.members = [  # of each flat group in each group of the optimizer
            [[t for t in targets if id(t) in place] for place in places] for targets in self.targets
        ]
        self.factor = 1.0  # of the last step
        self.base_lr = [group["lr"] for group in self.param_groups]

    def _master(self, k: int, flat: Flat) -> Tensor:
        """A copy of the shard on the tier of its optimizer state, with 32 bits or more."""
        if self.disk is not None:
            return self.disk.masters[k].tensor
        if not flat.moves.host_update:
            return flat.shard.float()
        if flat.moves.fetch:
            return self.tiers.empty(flat.shard.numel(), torch.float32).copy_(flat.shard)
        copied = begin_copy(flat.shard, self.tiers, "device", "host").wait()
        if flat.dtype not in HALF:
            return copied
        return self.tiers.empty(copied.numel(), torch.float32).copy_(copied)

    def _targets(self, k: int, flat: Flat) -> list[nn.Parameter]:
        if k not in self.masters:
            return flat.params
        master = self.masters[k]
        if flat.split:
            return [nn.Parameter(flat.views.piece(i, master)) for i in range(len(flat.params))]
        return [nn.Parameter(view) for view in flat.views.every(master)]

    def step(self, flats: Sequence[Flat] | None = None, factor: float = 1.0) -> None:
        """Update `flats` from the gradients on their parameters at rest, each times `factor`.

        Masters in host memory are updated there; `publish` brings them to the device.

        Raises InputError where a user's loop calls it: `engine.step(batch)` updates.
        """
        if flats is None:
            raise bad(
                "engine.optimizer.step()",
                "engine.step(batch), which runs forward, backward and the update; a scheduler on "
                "engine.optimizer steps after it",
                "engine.step(batch), then scheduler.step()",
            )
        self.factor = factor
        chosen = [k for k, flat in enumerate(self.flats) if flat in flats]
        self.follow()
        if self.disk is not None:
            self.disk.update(chosen, factor)
            return
        plain = [k for k in chosen if k not in self.masters]
        gradients = {k: self._gradients(k, factor) for k in chosen}
        if plain:
            self._step_only(plain)
        self._step_masters({k: gradients[k] for k in chosen if k in self.masters}, factor)

    @torch.no_grad()
    def follow(self) -> None:
        """Copy weights that the program has written to their masters."""
        for k, flat in enumerate(self.flats):
            flat.take_assigned()
            for index in flat.assigned if k in self.masters else ():
                self.targets[k][index].copy_(flat.views.part(index, flat.shard))
            flat.assigned.clear()

    def later(self, flats: Sequence[Flat], factor: float) -> Callable[[], None]:
        """The update of `flats`, all in host memory, as a function that may run beside a step.

        It reads the options of the groups now and the gradients when it runs: they must not be
        written until then.
        """
        self.factor = factor
        chosen = [k for k, flat in enumerate(self.flats) if flat in flats]
        options = [dict(group) for group in self.param_groups]
        every = {k: self._gradients(k, factor) for k in chosen}

        def update() -> None:
            self._step_masters(every, factor, options)
            for k in every:
                self._own(k)

        return update

    def _gradients(self, k: int, factor: float) -> list[Tensor | None]:
        """The gradient of each parameter for the update; in 32 bits and more it is multiplied."""
        flat = self.flats[k]
        if factor != 1.0 and flat.grads.gshard is not None and flat.dtype not in HALF:
            flat.grads.gshard.mul_(factor)
        return [flat.grads.piece(index) for index in range(len(flat.params))]

    def _step_only(
        self, chosen: Sequence[int], options: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """Torch's own step over the parameters of some flat groups.

        `options` are those of the groups at an earlier moment; the main thread may meanwhile change
        those of now.
        """
        members = [
            [p for k in chosen for p in self.members[k][g]] for g in range(len(self.param_groups))
        ]
        even_out(self.torch, members)
        step_over(self.torch, members, options)

    def _step_masters(
        self,
        gradients: Mapping[int, Sequence[Tensor | None]],
        factor: float,
        options: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Step on the masters of flat groups, in one call of torch's optimizer.

        In 16 bits each has its own call, which needs its gradients in 32.
        """
        wide = [k for k in gradients if self.flats[k].dtype not in HALF]
        parts = [wide, *([k] for k in gradients if k not in wide)]
        for part in filter(None, parts):
            for k in part:
                self.tiers.settle(self.masters[k])
                for p in self.flats[k].params if options is None else ():  # else in another step
                    p.grad = None
                own = gradients[k] if k in wide else _in_32_bits(gradients[k], factor)
                for target, gradient in zip(self.targets[k], own, strict=True):
                    target.grad = gradient
            self._step_only(part, options)
            for k in part:
                self._end_step(k)

    def _end_step(self, k: int) -> None:
        """Drop the gradients, and copy the masters to the weights that are on their tier."""
        flat = self.flats[k]
        for target in self.targets[k]:
            target.grad = None
        if not _apart(flat):
            self.tiers.settle(flat.shard)
            flat.shard.copy_(self.masters[k])

    @torch.no_grad()
    def publish(self, flats: Sequence[Flat] | None = None) -> None:
        """Copy the masters of `flats` (None: of all) that are in host memory to the device."""
        if self.disk is not None:  # its update has copied them, chunk by chunk
            return
        for k, flat in enumerate(self.flats):
            if not flat.moves.host_update or (flats is not None and flat not in flats):
                continue
            self._own(k)
            if _apart(flat):
                source = self.masters[k]
                if flat.dtype in HALF:
                    source = self.tiers.empty(source.numel(), flat.dtype).copy_(source)
                begin_copy(source, self.tiers, "host", "device", flat.shard).wait()

    def _own(self, k: int) -> None:
        """Count torch's states of masters in host memory as host memory."""
        for target in self.targets[k]:
            for value in list(self.torch.state.get(target, {}).values()):
                if isinstance(value, Tensor):
                    self.tiers.own(value)

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
        self._opt_called = True  # torch's schedulers check this

    def state_dict(self) -> dict[str, Any]:
        """The options of the groups (rates, betas), without tensors: `sw.save` keeps those.

        `sw.save` keeps these options too; this is for schedulers and for a program's own use.
        """
        named = [{"name": group["name"]} | groups.options(group) for group in self.param_groups]
        return {"state": {}, "param_groups": [{**group, "params": []} for group in named]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the options of the groups. Raises InputError for groups of another spec."""
        saved_groups = state_dict["param_groups"]
        both = saved_groups, self.param_groups
        names, own = ([group.get("name") for group in one] for one in both)
        if names != own:
            raise bad(
                f"engine.optimizer.load_state_dict with the groups {names}",
                f"the state_dict() of an engine's optimizer with the groups {own}",
                "the same specification, or sw.load(engine, folder), which loads options that fit",
            )
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            groups.take(group, groups.options(saved))

    def changed(self) -> dict[str, dict[str, Any]]:
        """By group and option, values that differ from the spec: [the spec's value, this one]."""
        return groups.changed(self.param_groups, self.spec_options)

    def load_changed(self, saved: dict[str, dict[str, Any]]) -> None:
        """Restore the values that `changed` returned (optimizer_groups.py)."""
        groups.take_changed(self.param_groups, self.spec_options, saved)

    def compared(self) -> dict[str, Any]:
        """The options of the groups, which all data ranks must have alike.

        Raises InputError for a learning rate, of a scheduler or a program, that is not finite.
        """
        groups.require_finite_rates(self.param_groups)
        found: dict[str, Any] = {}
        for group in self.param_groups:
            found |= groups.compared(group, f"the group {group['name']!r} of engine.optimizer")
        return found

    @property
    def compared_masters(self) -> dict[Flat, Tensor]:
        """The fp32 masters of 16-bit weights that ranks may compare: no thread writes to them."""
        return {
            self.flats[k]: master
            for k, master in self.masters.items()
            if self.flats[k].dtype in HALF and not self.flats[k].moves.host_update
        }

    def set_lr(self, lr: float) -> None:
        """Set the learning rate; groups with their own rate keep its proportion."""
        for group, base in zip(self.param_groups, self.base_lr, strict=True):
            group["lr"] = lr * base / self.torch.defaults["lr"] if self.torch.defaults["lr"] else lr

    @property
    def lr(self) -> float:
        """The learning rate of the group "default"."""
        return float(self.param_groups[0]["lr"])

    def squared_norm(self, flats: Sequence[Flat]) -> Tensor:
        """The sum of squares of the gradients of `flats` in this rank's blocks.

        If several ranks of an axis other than the data axes hold a gradient, one of them counts it.
        """
        in_memory = [f for f in flats if not f.moves.on_disk and f.grads.gshard is not None]
        found = [squares(flat) for flat in in_memory if counts(flat)]
        if self.disk is not None:
            found += self.disk.squares_of(flats)
        if not found:
            return torch.zeros((), dtype=torch.float64, device="cpu")
        # those of gradients in host memory are there, others on the device
        return torch.stack([squared.to(found[0].device) for squared in found]).sum()

    @torch.no_grad()
    def room(self, k: int, index: int, key: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """New memory for a state tensor of a parameter of the k-th flat, on the state's tier."""
        flat, target = self.flats[k], self.targets[k][index]
        if self.disk is not None:
            return self.disk.room(k, index, key, size, dtype)
        device = device_of(key, target, self.param_groups[self.group_of(target)])
        made = torch.zeros(tuple(size), dtype=dtype, device=device)
        return self.tiers.own(made) if flat.moves.host_update else made

    def group_of(self, target: Tensor) -> int:
        """The number of the group that a parameter is in."""
        return next(g for g, place in enumerate(self.places) if id(target) in place)

    def tensors(self) -> Iterator[tuple[Flat, int, str, Tensor]]:
        """Every state tensor: its flat group, the parameter's index in it, its key, the tensor."""
        for flat, targets in zip(self.flats, self.targets, strict=True):
            for index, target in enumerate(targets):
                # a copy: the host thread may be creating the state
                state = list(self.torch.state.get(target, {}).items())
                for key, value in state:
                    yield from ((flat, index, key, t) for t in leaves(value, Tensor))

    def map_state(self, act: Callable[[Tensor], None]) -> None:
        """Call `act` on every tensor this optimizer keeps, masters included."""
        for master in self.masters.values():
            act(master)
        for _, _, _, value in self.tensors():
            act(value)
        if self.disk is not None:
            for tensor in self.disk.tensors():
                act(tensor)


def _in_32_bits(gradients: Sequence[Tensor | None], factor: float) -> list[Tensor | None]:
    return [None if g is None else g.float().mul_(factor) for g in gradients]


def _apart(flat: Flat) -> bool:
    """Whether updated masters are copied to another tier, on which the parameters rest."""
    return flat.moves.host_update and flat.moves.fetch != "host"
