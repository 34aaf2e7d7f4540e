"""Finds the layers of a model, assigns them to stages, and puts stand-ins in their places.

    starts = ("blocks.2",)                  the modules that begin stages 1, 2, ...

    layers      embed  blocks.0  blocks.1 | blocks.2  blocks.3  norm  head
    rank 0      real   real      real     | stand-in  stand-in  ...
    rank 1      stand-in  ...             | real      real      real  real
    twin        meta   meta      meta     | meta      meta      meta  meta

A *layer* runs whole within one stage: it is a maximal module that has a forward, holds parameters
or persistent buffers, and has no start strictly inside. A module with layers inside is a
*container*. Modules that hold nothing (rotary positions, dropout) are on every rank, and their
calls are glue (stage.py).

The *twin* is the whole model on the meta device. It gives shapes, and the attributes of layers on
other ranks: `stand_in.attention_type` is the attribute of the twin's layer.

While a stage runs, a stand-in replaces every layer, also this rank's own, and passes each call to
the player. At all other times this rank's layers are in their usual places, so names, hooks,
`state_dict` and optimizers are unaffected.
"""

import copy
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shardwise.comm.parameter import attributes, meta_parameters
from shardwise.core.errors import bad
from shardwise.core.tools.arguments import suggest
from shardwise.techniques.pipeline.trace.interceptor import Glue, Of, StandIn, hooks_of

#: The places of the calls of each module, by all its names, in a forward pass.
Calls = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class StageLayer:
    """A layer's names in the model, and its stages: a module that is called twice may be in two."""

    names: tuple[str, ...]
    stages: tuple[int, ...]


# --- the cut ---------------------------------------------------------------------------------


def layers(
    model: nn.Module, starts: Sequence[str], calls: Calls | None = None
) -> dict[str, StageLayer]:
    """The layers of `model` by their first name, in the order of `calls`. A layer's stages are, for
    each of its calls, the number of starts at or before it.
    """
    calls = calls or defined(model)
    _check(model, starts, calls)
    at = [calls[name][0] for name in starts]
    names: dict[nn.Module, list[str]] = {}
    for name, module in ((n, m) for n, m, is_layer in _walk(model, "", starts) if is_layer):
        names.setdefault(module, []).append(name)
    found: dict[str, StageLayer] = {}
    for known in names.values():
        stages = {bisect_right(at, place) for name in known for place in calls[name]}
        found[known[0]] = StageLayer(tuple(known), tuple(sorted(stages)))
    found = dict(sorted(found.items(), key=lambda pair: calls[pair[0]][0]))
    filled = {stage for layer in found.values() for stage in layer.stages}
    for stage, start in enumerate(["", *starts]):
        if stage not in filled:
            given = f"stage {stage}, from {start or 'the first module'} on, without a layer in it"
            allowed = f"a layer or more in each of {len(starts) + 1} stages: "
            allowed += _some(list(found)) or "the model has none"
            raise bad(given, allowed, "fewer stages, or other starts")
    return found


def stages_of(
    model: nn.Module, starts: Sequence[str], calls: Calls | None = None
) -> dict[str, tuple[int, ...]]:
    """The stages of each parameter, by name, before the model is partitioned. A container's own
    parameters are in stage 0, also if a layer of another stage shares them.
    """
    found: dict[nn.Parameter, set[int]] = {p: set() for p in model.parameters()}
    for name, layer in layers(model, starts, calls).items():
        for p in model.get_submodule(name).parameters():
            found[p] |= set(layer.stages)
    for _, module, is_layer in _walk(model, "", starts):
        for p in () if is_layer else module.parameters(recurse=False):
            found[p].add(0)
    return {name: tuple(sorted(found[p])) for name, p in model.named_parameters()}


def defined(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The calls of a model whose modules are called once, in the order of definition."""
    names = (name for name, _ in model.named_modules(remove_duplicate=False))
    return {name: (place,) for place, name in enumerate(names)}


def _walk(
    module: nn.Module, name: str, starts: Sequence[str]
) -> Iterator[tuple[str, nn.Module, bool]]:
    yield name, module, False
    for key, child in module._modules.items():
        full = f"{name}.{key}" if name else key
        if child is None:
            continue
        if _is_layer(child) and not any(start.startswith(f"{full}.") for start in starts):
            yield full, child, True
        else:
            yield from _walk(child, full, starts)


def _is_layer(module: nn.Module) -> bool:
    runs = type(module).forward is not nn.Module.forward
    persists = any(
        b is not None and key not in m._non_persistent_buffers_set
        for m in module.modules()
        for key, b in m._buffers.items()
    )
    return runs and (next(module.parameters(), None) is not None or persists)


def _check(model: nn.Module, starts: Sequence[str], calls: Calls) -> None:
    for name in starts:
        if not name or name not in calls:
            raise bad(
                f'"{name}", which is no module of the {type(model).__name__}',
                f"names of its modules, such as {_some([key for key in calls if key])}",
                f'"{suggest(name, calls)}"',
            )
    right = sorted(dict.fromkeys(starts), key=lambda name: calls[name][0])
    if right != list(starts):
        allowed = "the first module of each later stage, each once, in the order of calls"
        raise bad(f"starts {', '.join(starts)}", allowed, ", ".join(right))
    known: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        known.setdefault(module, []).append(name)
    for names in [names for names in known.values() if len(names) > 1]:
        for start in starts:
            if any(start.startswith(f"{name}.") for name in names):
                raise bad(
                    f"{start} as a start, inside of a module that has the names {', '.join(names)}",
                    "starts in modules with one name, because a module is partitioned once",
                    names[0],
                )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


# --- the twin --------------------------------------------------------------------------------


def twin(model: nn.Module) -> nn.Module:
    """A copy of `model` on the meta device; tied parameters stay tied, frozen ones frozen."""
    left = (x for x in attributes(model) if not x.is_leaf)  # by a forward, as weight_norm's
    plain = {id(x): torch.empty_like(x, device="meta") for x in (*model.buffers(), *left)}
    try:
        found = copy.deepcopy(model, plain | meta_parameters(model))
    except (TypeError, RuntimeError) as error:
        raise bad(
            f"a {type(model).__name__} that cannot be copied ({error})",
            "a model that copy.deepcopy can copy to the meta device, where its shapes are traced",
            "modules without locks, files, generators and results of a forward as attributes",
        ) from error
    for module in (m for m in found.modules() if parametrize.is_parametrized(m)):
        # its class, which a copy shares, refers to the module that was parametrized
        module.__class__ = type(module).__bases__[0]
        parametrize._inject_new_class(module)
        for name in module.get_submodule("parametrizations")._modules:
            parametrize._inject_property(module, name)
    return found


# --- in place --------------------------------------------------------------------------------


#: A slot of a module: its table of modules, or of parameters, and the key in it.
Slot = tuple[dict[str, Any], str]


class StageLayers:
    """The layers of one model on a rank with `own_stages`; changes the model in place.

    count        stages
    parameters   (name, stages, the twin's parameter) of each; a tied one appears once
    buffers      (name, stages, the twin's table and key, ours or None) of each in a layer

    Parameters and buffers are values from the start, numbered in this order, which glue may read. A
    container's own parameters belong to stage 0, and reach later stages like activations; its
    buffers are on every rank. Raises InputError as `layers` does.
    """

    def __init__(
        self,
        model: nn.Module,
        twin: nn.Module,
        starts: Sequence[str],
        own_stages: Collection[int],
        calls: Calls | None = None,
    ) -> None:
        self.model, self.twin, self.own_stages = model, twin, frozenset(own_stages)
        self.count = len(starts) + 1
        self.found = found = layers(model, starts, calls)
        outside = {name: m for name, m, is_layer in _walk(model, "", starts) if not is_layer}
        #: containers and glue, ours and the twin's
        self.pairs = [(m, twin.get_submodule(name)) for name, m in outside.items()]
        self._own_parameters(stages_of(model, starts, calls))
        self.standing: list[Of] = []
        self.stand_ins: list[StandIn] = []
        self.buffers: list[tuple[str, tuple[int, ...], Slot, dict[str, Any] | None]] = []
        self.swaps: list[tuple[Slot, nn.Module, nn.Module]] = []
        for name, layer in found.items():
            self._stand_in(name, layer)
        self.lent: list[tuple[Slot, Tensor]] = []
        for ours, theirs in self.pairs:
            self._take_parameters(ours, theirs)

    def _own_parameters(self, stages: Mapping[str, tuple[int, ...]]) -> None:
        self.parameters = [(name, stages[name], p) for name, p in self.twin.named_parameters()]
        #: the number of each parameter, ours and the twin's, by id
        self.numbers = {id(p): n for n, (_, _, p) in enumerate(self.parameters)}
        self.own: dict[int, dict[int, Tensor]] = {stage: {} for stage in self.own_stages}
        self.absent: list[tuple[weakref.ref[nn.Parameter], int]] = []
        for number, (name, p) in enumerate(self.model.named_parameters()):
            for stage in (own := self.own_stages & {*stages[name]}):
                self.own[stage][number] = p
                self.numbers[id(p)] = number
            self.absent += [] if own else [(weakref.ref(p), number)]

    def numbered(self) -> dict[int, int]:
        """`numbers`, and those of other ranks' parameters that the program has kept (in a list)."""
        self.absent = [(p, number) for p, number in self.absent if p() is not None]
        kept = {id(p()): number for p, number in self.absent}
        return self.numbers | kept if kept else self.numbers

    def _own_buffers(self, of: Of) -> None:
        """Record the buffers of a layer, by table and key: the layer may replace a buffer."""
        real = {} if of.real is None else dict(of.real.named_modules())
        for name, module in of.twin.named_modules():
            ours = None if of.real is None else real[name]._buffers
            for key in [key for key, b in module._buffers.items() if b is not None]:
                full = ".".join(filter(None, (of.name, name, key)))
                self.buffers.append((full, of.stages, (module._buffers, key), ours))

    @property
    def real(self) -> list[nn.Module]:
        return [of.real for of in self.standing if of.real is not None]

    @property
    def elsewhere(self) -> list[nn.Module]:
        return [of.twin for of in self.standing if of.real is None]

    @cached_property
    def _with_modes(self) -> tuple[list[nn.Module], list[nn.Parameter]]:
        models = [self.model, *self.elsewhere]
        return [m for x in models for m in x.modules()], [p for x in models for p in x.parameters()]

    @property
    def modes(self) -> Hashable:
        """Which modules are in training mode and which parameters train: a trace depends on it."""
        modules, params = self._with_modes
        return tuple([m.training for m in modules]), tuple([p.requires_grad for p in params])

    def known_values(self) -> Sequence[tuple[str, tuple[int, ...], Tensor]]:
        buffers = [(f"the buffer {n}", at, table[k]) for n, at, (table, k), _ in self.buffers]
        return [*((f"the parameter {n}", at, p) for n, at, p in self.parameters), *buffers]

    def holding(self, stage: int) -> dict[int, Tensor]:
        """This rank's parameters and buffers of a stage, by number."""
        first = len(self.parameters)
        buffers = {
            first + i: ours[key]
            for i, (_, stages, (_, key), ours) in enumerate(self.buffers)
            if ours is not None and stage in stages
        }
        return self.own[stage] | buffers

    def number_buffers(self, put: Callable[[Tensor, int], None]) -> None:
        for number, (_, _, (table, key), ours) in enumerate(self.buffers, len(self.parameters)):
            put(table[key], number)
            if ours is not None:
                put(ours[key], number)

    def _stand_in(self, name: str, layer: StageLayer) -> None:
        theirs, ours = self.twin.get_submodule(name), self.model.get_submodule(name)
        of = Of(name, layer.stages, theirs, ours if self.own_stages & set(layer.stages) else None)
        stand_in = StandIn.of_kind(of)
        self.standing.append(of)
        self.stand_ins.append(stand_in)
        self._own_buffers(of)
        for each in layer.names:
            _put(self.twin, each, stand_in)
            slot = _put(self.model, each, stand_in if of.real is None else of.real)
            self.swaps += [] if of.real is None else [(slot, of.real, stand_in)]

    def _take_parameters(self, ours: nn.Module, theirs: nn.Module) -> None:
        """Remove a container's parameters of other ranks; during a run the twin provides them."""
        for key, p in theirs._parameters.items():
            if p is not None and not self.own_stages & set(self.parameters[self.numbers[id(p)]][1]):
                del ours._parameters[key]
                self.lent.append(((ours._parameters, key), p))

    @contextmanager
    def following(self, player: Glue) -> Iterator[nn.Module]:
        """The twin, with `player` for its layers, our training mode, and copies of our buffers."""
        for ours, theirs in self.pairs:
            theirs.training = ours.training
            for key, b in ours._buffers.items():
                theirs._buffers[key] = None if b is None else b.detach().clone()
        for of in self.standing:
            of.player, of.following = player, True
            real = {} if of.real is None else dict(of.real.named_modules())
            for name, module in of.twin.named_modules():
                module.training = real.get(name, module).training
        for number, p in (each for own in self.own.values() for each in own.items()):
            if p.requires_grad:  # a freeze may be known to this rank alone
                self.parameters[number][2].requires_grad_()
        try:
            yield self.twin
        finally:
            for of in self.standing:
                of.player, of.following = None, False
            for table in (theirs._buffers for _, theirs in self.pairs):
                table.update({k: None if b is None else b.to("meta") for k, b in table.items()})

    @contextmanager
    def playing(self, player: Glue) -> Iterator[nn.Module]:
        """The model, with a stand-in for every layer during the `with`, and its modes after it: a
        stage ends in the middle of a loss that sets them, or that registers hooks for a call.
        """
        hooks = [(table, dict(table)) for x in self.stand_ins for table in hooks_of(x)]
        modes = [(module, module.training) for module in self._with_modes[0]]
        before = [(of.player, of.following) for of in self.standing]  # of a trace, in its midst
        for of in self.standing:
            of.player, of.following = player, False
        for (table, key), _, stand_in in self.swaps:
            table[key] = stand_in
        for (table, key), p in self.lent:
            table[key] = p
        try:
            yield self.model
        except BaseException:
            for table, old in hooks:
                table.clear()
                table.update(old)
            raise
        finally:
            for of, (old, following) in zip(self.standing, before, strict=True):
                of.player, of.following = old, following
            for (table, key), real, _ in self.swaps:
                table[key] = real
            for (table, key), _ in self.lent:
                del table[key]
            for module in [module for module, mode in modes if module.training != mode]:
                module.training = not module.training


def _put(model: nn.Module, name: str, module: nn.Module) -> Slot:
    parent, _, key = name.rpartition(".")
    table = model.get_submodule(parent)._modules
    table[key] = module
    return table, key
