"""The state of a loop of the program's own: a module of sw.DDP, sw.FSDP or sw.Pipe, an optimizer.

It is in a checkpoint as an engine's (state.py), with the options of the optimizer's groups:

    "groups": [{"options": {"lr": 0.001, ...}, "params": [names]}, ...]

Each parameter brings its options, because a rank of a pipeline has only some of them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.world import World
from shardwise.core.errors import bad
from shardwise.core.tools.arguments import short_repr
from shardwise.core.tools.structure import uncompiled
from shardwise.engine.checks import reads
from shardwise.engine.optimizer import optimizer_state
from shardwise.engine.optimizer.optimizer_state import (
    NAMING,
    Catalogue,
    HeldParameter,
    device_of,
    put,
)
from shardwise.engine.optimizer.owners import needs_whole
from shardwise.engine.state import extra_state, state
from shardwise.engine.state.box import Box
from shardwise.engine.state.full import data_boxes, pipe_boxes, pipe_names
from shardwise.engine.state.json_values import pack, unpack
from shardwise.techniques.data.apply import driver_of, flats_of
from shardwise.techniques.data.unit_hooks import Data
from shardwise.wrap.pipe import Piped, pipe_of
from shardwise.wrap.plain_optimizer import whole_steps


class PlainLoop:
    """A wrapped module and the optimizer that trains it; None if only weights are meant."""

    def __init__(self, module: Any, optimizer: Any, caller: str) -> None:
        self.module, self.by = _wrapped(module, caller)
        self.by.structure.require_unchanged()
        self.optimizer: Optimizer | None = optimizer
        if self.optimizer is not None:
            reads.prepare(self.optimizer)
        assert self.by.world is not None  # it has, in a loop of the program's own
        self.world: World = self.by.world
        self.every = self._held()
        #: whose states are on this rank
        self.held = [held for held in self.every if self._owned.get(id(held.param), True)]
        if optimizer is not None:
            _require_own(optimizer, self.every, caller)

    @property
    def plain(self) -> nn.Module:
        return self.by.staged.stages.layers.twin if isinstance(self.by, Piped) else self.module

    @property
    def trained(self) -> set[str]:
        return {held.name for held in self.every if held.param.requires_grad}

    def _held(self) -> list[HeldParameter]:
        if isinstance(self.by, Piped):
            return [
                _whole(name, p, copy, self._room(p))
                for name, p, copy in pipe_names(self.module, self.by)
            ]
        self.by.finish_sums()
        self.by.between_passes()
        self.by.units.to_sharded()
        return [
            state.held_parameter(flat, index, p, self._room(p), owned=id(p) in self._owned)
            for flat in flats_of(self.by.units.order)
            for index, p in enumerate(flat.params)
        ]

    @property
    def _owned(self) -> Mapping[int, bool]:
        """Of parameters whose states one rank has whole: whether it is this one."""
        if self.optimizer is None or isinstance(self.by, Piped) or not needs_whole(self.optimizer):
            return {}
        return whole_steps(self.optimizer, self.by).owned

    def _room(self, p: nn.Parameter) -> optimizer_state.Room:
        group = next((g for g in self._param_groups if any(q is p for q in g["params"])), {})

        def room(key: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.zeros(tuple(size), dtype=dtype, device=device_of(key, p, group))

        return room

    # --- saving -------------------------------------------------------------------------------

    def compare_ranks(self) -> None:
        self.by.compare_ranks()

    def boxes(self) -> list[Box]:
        states, _ = optimizer_state.outgoing(self._states, self.held)
        extra, _ = extra_state.outgoing(self.module, self._copy)
        return [*self._model(), *states, *extra]

    def scalars(self) -> dict[str, Any]:
        """What is no tensor, for JSON.  Called by all ranks."""
        _, states = optimizer_state.outgoing(self._states, self.held)
        _, extra = extra_state.outgoing(self.module, self._copy)
        local = {"states": states, "modules": extra, "groups": self._groups()}
        scalars = state.merged(local, self.world)
        kind = None if self.optimizer is None else type(self.optimizer).__name__
        names_by_options: dict[str, list[str]] = {}
        for name, options in sorted(scalars.pop("groups").items()):
            names_by_options.setdefault(json.dumps(options), []).append(name)
        groups = [
            {"options": json.loads(text), "params": names}
            for text, names in names_by_options.items()
        ]
        return scalars | {"optimizer": kind, "groups": groups}

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    @property
    def _states(self) -> Mapping[Any, dict[str, Any]]:
        return {} if self.optimizer is None else self.optimizer.state

    def _model(self) -> list[Box]:
        make = pipe_boxes if isinstance(self.by, Piped) else data_boxes
        return make(self.module, self.by)  # type: ignore[arg-type]

    def _copy(self, name: str) -> int:
        """This rank's index among the holders of the module of that name."""
        if isinstance(self.by, Piped):
            return self.by.staged.copy(name)
        shard, replicate = self.by.consensus.axes
        return replicate.rank * shard.size + shard.rank

    def _groups(self) -> dict[str, Any]:
        names = {id(held.param): held.name for held in self.every}
        return {
            names[id(p)]: _options(group) for group in self._param_groups for p in group["params"]
        }

    # --- loading ------------------------------------------------------------------------------

    def loading(self, saved: Catalogue, scalars: Mapping[str, Any]) -> list[Box]:
        """The boxes to fill from a checkpoint with these tensors and scalars; then `loaded()`."""
        if self.optimizer is not None:
            _require_same_kind(self.optimizer, scalars.get("optimizer"))
        self.options = self._saved_options(scalars.get("groups", ()))
        held = [] if self.optimizer is None else self.held
        values = scalars.get("states", {})
        states, self.give = optimizer_state.incoming(self._states, held, saved, values)
        extra, self.give_extra = extra_state.incoming(
            self.module, saved, scalars.get("modules", {})
        )
        return [*self._model(), *states, *extra]

    def _saved_options(
        self, groups: Sequence[Mapping[str, Any]]
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        names = {id(held.param): held.name for held in self.every}
        options = {name: group["options"] for group in groups for name in group["params"]}
        pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for group in self._param_groups:
            members = [names[id(p)] for p in group["params"]]
            several = {json.dumps(options.get(name)): name for name in members}
            if len(several) > 1 or "null" in several:
                pair = " and ".join([*several.values()][:2])
                raise bad(
                    f"an optimizer with a group of parameters ({pair}) that were not in one group "
                    "when the checkpoint was saved",
                    "the groups of parameters that the saved optimizer had, or parts of them",
                    "the same param_groups, or an optimizer without a checkpoint: sw.load(module, "
                    "folder)",
                )
            pairs += [(group, unpack(options[members[0]], {}))] if members else []
        return pairs

    def loaded(self) -> None:
        """The boxes are filled: the optimizer and the modules get what was saved."""
        if self.optimizer is not None:
            self.give(self.optimizer.state)
        for group, options in self.options:
            put(group, options)
        self.give_extra()


def _wrapped(module: Any, caller: str) -> tuple[nn.Module, Data | Piped]:
    """The module that was wrapped, and what wraps it.  Raises InputError for anything else."""
    for each in (module, uncompiled(module)) if isinstance(module, nn.Module) else ():
        by = pipe_of(each) or driver_of(each)
        if isinstance(by, Piped) or (by is not None and by.pace.by_hand):
            return each, by
    what = f"a plain {type(module).__name__}" if isinstance(module, nn.Module) else ""
    raise bad(
        f"{caller} of {what or short_repr(module)}",
        "an engine, or a module that sw.DDP, sw.FSDP or sw.Pipe has wrapped; its optimizer as "
        "optimizer=",
        f"{caller}(sw.DDP(module), folder, optimizer=optim); on one process it is the same module",
    )


def _require_own(optimizer: Optimizer, every: Sequence[HeldParameter], caller: str) -> None:
    known = {id(held.param) for held in every}
    other = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in known]
    if other:
        raise bad(
            f"{caller} with an optimizer that has {len(other)} parameters of another module, the "
            f"first of shape {list(other[0].shape)}",
            "an optimizer over parameters of the module that is saved",
            "one module with all of them, wrapped at once, or an optimizer for each module",
        )


def _require_same_kind(optimizer: Optimizer, saved: str | None) -> None:
    own = type(optimizer).__name__
    if own != saved:
        has = f"the states of {saved}" if saved else "no states of an optimizer"
        raise bad(
            f"a checkpoint with {has}, for an optimizer of the class {own}",
            "the class of optimizer that was saved",
            "sw.load(module, folder), for the weights alone",
        )


def _options(group: Mapping[str, Any]) -> Any:
    """The options of a group, without functions. Raises InputError if JSON lacks their form."""
    found = {k: _number(v) for k, v in group.items() if k not in NAMING and not callable(v)}
    return {"dict": [[k, pack(v, "the optimizer's options", k, None)] for k, v in found.items()]}


def _number(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_number, value))
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


def _whole(name: str, p: nn.Parameter, copy: int, room: optimizer_state.Room) -> HeldParameter:
    def boxes(called: str, value: Tensor) -> list[Box]:
        return [Box.full(called, value, copy)]

    return HeldParameter(name, p, tuple(p.shape), tuple(p.shape), boxes, copy, room)
