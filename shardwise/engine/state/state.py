"""The state of an engine for a checkpoint, as boxes of full named tensors.

    model/NAME           the weight (for 16-bit weights, the fp32 master)
    optim/KEY/NAME       a state tensor of the optimizer (optimizer_state.py)
    buffer/NAME          a buffer of the model
    extra/PATH/NAME      a tensor in the extra state of a module (extra_state.py)

A checkpoint has names and full shapes only, not the row, the ranks or the units, so any plan can
load the checkpoint of any other.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.move import all_gather_object
from shardwise.comm.world import World
from shardwise.core.errors import bad
from shardwise.core.tools.hook import Hook
from shardwise.core.tools.structure import plain_key
from shardwise.engine.build import ShardedModel
from shardwise.engine.optimizer.elementwise import ELEMENTWISE
from shardwise.engine.optimizer.optimizer import ShardedOptimizer
from shardwise.engine.optimizer.optimizer_state import (
    Catalogue,
    HeldParameter,
    Room,
    device_of,
    incoming,
    outgoing,
)
from shardwise.engine.state import extra_state
from shardwise.engine.state.box import Box, block, data_copy, pieces
from shardwise.flat.flat_parameter import Flat
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.data.units import Units


def boxes(model: nn.Module, sharded: ShardedModel, optimizer: ShardedOptimizer) -> list[Box]:
    """All boxes of this rank; `replica` is 0 on one holder of each. Raises DiskError."""
    states, _ = outgoing(optimizer.states.every(), held_parameters(optimizer))
    extra, _ = extra_state.outgoing(model, sharded.copy)
    return [*weights(sharded.flats, optimizer), *states, *buffers(model, sharded), *extra]


def values(
    model: nn.Module, sharded: ShardedModel, optimizer: ShardedOptimizer, world: World
) -> dict[str, Any]:
    """What is no tensor in the optimizer's states and in the modules'.  All ranks call it."""
    _, states = outgoing(optimizer.states.every(), held_parameters(optimizer))
    _, extra = extra_state.outgoing(model, sharded.copy)
    return merged({"states": states, "modules": extra}, world)


def merged(own: dict[str, dict[str, Any]], world: World) -> dict[str, dict[str, Any]]:
    every = all_gather_object(own, world)
    return {kind: {k: v for each in every for k, v in each[kind].items()} for kind in own}


def loading(
    model: nn.Module,
    sharded: ShardedModel,
    optimizer: ShardedOptimizer,
    saved: Catalogue,
    scalars: Mapping[str, Any],
) -> tuple[list[Box], Callable[[], None]]:
    """The boxes to fill from a checkpoint with these tensors and scalars, and the function that
    gives the optimizer and the modules their states.
    """
    states, give_states = incoming(
        optimizer.states.every(),
        held_parameters(optimizer),
        saved,
        scalars.get("states", {}),
        expected=_expected(optimizer, saved, scalars),
    )
    extra, give_extra = extra_state.incoming(model, saved, scalars.get("modules", {}))
    fixed = [*weights(sharded.flats, optimizer), *buffers(model, sharded)]

    def give() -> None:
        give_states(optimizer.state)
        give_extra()

    return [*fixed, *states, *extra], give


def weights(flats: Sequence[Flat], optimizer: ShardedOptimizer) -> list[Box]:
    optimizer.follow(optimizer.flats)
    optimizer.expose()
    return [box for f in flats for box in boxes_of(f, "model", optimizer.masters.get(f))]


def boxes_of(flat: Flat, kind: str, block: Tensor | None = None) -> Iterator[Box]:
    """The boxes of this rank's block of a flat parameter, with values from `block` if not None."""
    flat.take_assigned()
    values = flat.shard if block is None else block
    for index, (name, (low, high)) in enumerate(zip(flat.names, flat.pieces, strict=True)):
        yield from pieces(flat, index, f"{kind}/{name}", values[low:high])


def held_parameters(optimizer: ShardedOptimizer) -> list[HeldParameter]:
    """The trained parameters, for their states."""
    owners = optimizer.owners
    return [
        held_parameter(
            flat,
            index,
            flat.params[index],
            partial(_room, optimizer, flat, index),
            owned=(flat, index) in owners.targets,
        )
        for flat in optimizer.flats
        for index in range(len(flat.params))
        if (flat, index) not in owners.targets or owners.is_here(flat, index)
    ]


def _room(
    optimizer: ShardedOptimizer,
    flat: Flat,
    index: int,
    key: str,
    size: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Memory for a state tensor of a parameter of `flat`, on the state's tier."""
    runs = optimizer.runs[flat]
    block = runs.blocks.get(key)
    if block is not None and len(size) and block.dtype == dtype:
        return flat.views.part(index, block)
    place = device_of(key, optimizer.block(flat), optimizer.param_groups[runs.groups[index]])
    made = torch.zeros(tuple(size), dtype=dtype, device=place)
    return optimizer.tiers.own(made) if flat.moves.offload else made


def held_parameter(
    flat: Flat, index: int, param: Tensor, make: Room, *, owned: bool = False
) -> HeldParameter:
    """A parameter of a flat parameter, for the optimizer's state under the key `param`.
    `owned`: this rank has the state of the whole parameter.
    """
    name, first = flat.names[index], flat.plan.offsets[index] // max(1, flat.plan.share)
    # the first holder has its first element
    first = flat.shard_axis.rank if owned else first
    copy = data_copy(flat, first) + flat.layouts[index].holder(flat.local.coordinates)
    shape = flat.layouts[index].full_shape(tuple(flat.shapes[index]))

    def boxes(called: str, value: Tensor) -> Iterable[Box]:
        if owned:
            return [Box.full(called, value, copy)]
        return pieces(flat, index, called, value.reshape(-1))

    local = shape if owned else tuple(flat.views.part(index, flat.shard).shape)
    return HeldParameter(name, param, shape, local, boxes, copy, make)


def buffers(model: nn.Module, sharded: ShardedModel) -> list[Box]:
    return [
        Box.full(f"buffer/{plain_key(name)}", b, sharded.copy(name))
        for name, b in model.named_buffers()
    ]


def gradients(optimizer: ShardedOptimizer) -> list[Box]:
    """This rank's pieces of the gradients, named "grad/NAME", as the last update used them."""
    found: list[Box] = []
    optimizer.expose()
    for flat in optimizer.flats:
        if flat.grads.gshard is None:
            continue
        in_place = optimizer.scales_in_place(flat)
        factor = 1.0 if in_place else optimizer.factor
        wide = torch.promote_types(flat.dtype, torch.float32)
        used = flat.grads.gshard if in_place else flat.grads.gshard.to(wide) * factor
        found += boxes_of(flat, "grad", used)
    return found


def _expected(
    optimizer: ShardedOptimizer, saved: Catalogue, scalars: Mapping[str, Any]
) -> Callable[[HeldParameter], set[str]]:
    """The keys of a parameter's state, where a checkpoint may be one of another optimizer.
    The keys of one class may depend on a parameter's sizes, except in classes of torch.  Raises
    InputError for a checkpoint without any state, saved by another class of optimizer.
    """
    spec, known = optimizer.spec, scalars.get("optimizer")
    name = spec.kind.__name__
    keys = cache(lambda group, dims: {*spec.first_state(group, [2] * dims)})
    states = scalars.get("states") or any(tensor.startswith("optim/") for tensor in saved)
    if not states and not (name == known if known else scalars["step"] == 0 or not keys(0, 2)):
        raise bad(
            f"a checkpoint of step {scalars['step']}, saved by {known or 'another optimizer'}, "
            f"without states of {name}",
            "a checkpoint of the same class of optimizer",
            "the optimizer that it was saved with; 'shardwise checkpoint export' for the weights",
        )
    if name == known and name not in ELEMENTWISE:
        return lambda _: set()
    return lambda held: keys(spec.number(held.name, len(held.shape)), len(held.shape))


@torch.no_grad()
def refresh(optimizer: ShardedOptimizer, units: Units) -> None:
    """After loading: weights follow their masters, gathered copies follow the pieces."""
    optimizer.loaded()
    units.to_sharded()
    units.begin_unshard()


# --- the state_dict of an engine's model and of a wrapped module ----------------------------------


def accept_whole(model: nn.Module, data: Data, flats: Sequence[Flat]) -> None:
    """Make `model.load_state_dict` accept the plain model's state, besides this rank's pieces."""
    cut = any(tuple(flat.shapes[i]) != shape for flat, i, _, shape in _every(flats))
    if data.staged is not None or data.split or cut:
        model.register_load_state_dict_pre_hook(Hook(data, partial(_own_parts, data, flats)))


def _every(flats: Sequence[Flat]) -> Iterator[tuple[Flat, int, nn.Parameter, tuple[int, ...]]]:
    """Each parameter with its flat parameter, its index there and its full shape."""
    for flat in flats:
        for index, (p, layout) in enumerate(zip(flat.params, flat.layouts, strict=True)):
            yield flat, index, p, layout.full_shape(tuple(flat.shapes[index]))


@torch.no_grad()
def _own_parts(
    data: Data,
    flats: Sequence[Flat],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    *_: Any,
) -> None:
    names, loaded = defaultdict[int, list[str]](list), dict[str, Any]()
    registered = dict(module.named_parameters(remove_duplicate=False))
    for name, p in registered.items():
        names[id(p)].append(name)
    data.units.to_sharded()
    for flat, index, p, shape in _every(flats):
        named = names[id(p)] or [flat.names[index]]  # of a tile: its layer's
        for name in named if shape != tuple(p.shape) else ():
            value: Any = state.get(prefix + name)
            whole = tuple(getattr(value, "shape", ())) == shape
            for box in pieces(flat, index, name, p.view(-1)) if whole else ():
                box.tensor.copy_(block(value, box.offsets, box.sizes))
            loaded |= {prefix + name: registered[name]} if whole else {}
    state.update(loaded)
