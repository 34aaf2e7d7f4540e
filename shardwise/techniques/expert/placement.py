"""`sw.place_experts`: moves experts between the ranks of `ep`, so that these compute as many rows.

    load of each expert      9   8   1   2            rows of rank 0: 17, of rank 1: 3
    placement before         0   0   1   1
    after                    0   1   0   1            rows of rank 0: 10, of rank 1: 10

An expert keeps its number: routers, loads and checkpoints are unchanged, and so is what is trained.
Only the layout of the stacked weights on `ep` changes: a rank's ranges of the experts need not be
neighbours. Weights and the optimizer's states are moved by this layout, as if a checkpoint were
saved and loaded, one tensor at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.comm.move import move
from shardwise.comm.objects import all_gather_object
from shardwise.core.errors import bad
from shardwise.core.layouts.layout import I, P
from shardwise.core.layouts.param_layout import AxisLayout
from shardwise.core.layouts.uneven import Cut
from shardwise.core.mesh import EXPERTS
from shardwise.core.tools.arguments import short_repr
from shardwise.engine.engine import Engine
from shardwise.engine.state import state
from shardwise.engine.state.box import Box, block
from shardwise.techniques.expert.apply import ExpertLayout, layers_of
from shardwise.techniques.expert.moe_layer import MoE

#: The experts of each rank of `ep`, in the order in which it stores them.
Placement = tuple[tuple[int, ...], ...]


@torch.no_grad()
def place_experts(
    engine: Engine, placement: Mapping[str, Sequence[Sequence[int]]] | None = None
) -> dict[str, Placement]:
    """Place the experts of sw.MoE layers on the ranks of `ep`. Called by all ranks, between steps.

    `placement` has the experts of each rank by the name of the layer. None: by their loads in the
    last step, the busiest first, each to the rank with the fewest rows so far. Returns the
    placement of this rank's layers. While a stack of weights is moved, every rank stores all of
    it. `engine.gradients()` is valid again after the next step.

    Raises:
        InputError: there was no step yet; a layer is unknown; a placement that is not a
            permutation of the experts, as many on each rank; an optimizer whose states do not have
            the shape of the weight; a schedule that keeps versions of the weights.
    """
    layers, ranks = layers_of(engine.model), engine.plan.ep
    own = {name: layers[name] for name in engine.sharded.of(ExpertLayout).loads if name in layers}
    wanted = _asked(layers, placement, ranks) if placement is not None else _by_load(engine, own)
    if ranks == 1:
        return wanted
    if engine.updates.updater.by_schedule:
        given = f"place_experts under '{engine.plan}', which keeps versions of the weights"
        raise bad(given, "a schedule that updates at the end of a step", "'1f1b:8', for example")
    engine.flush()
    engine.data.units.to_sharded()
    before = _stacks(engine, wanted)
    for name, experts in wanted.items():
        _relabel(engine, layers[name], f"{name}.experts", experts)
    after = _stacks(engine, wanted)
    own = {name: (boxes[0].shape, boxes[0].tensor.dtype) for name, boxes in before.items()}
    # a rank may have no element of a tensor that others of its group have
    every = {
        name: how for each in all_gather_object(own, engine.world) for name, how in each.items()
    }
    for name in sorted(every):
        if any(f"/{layer}.experts." in name for layer in wanted):
            whole = torch.zeros(every[name][0], dtype=every[name][1], device=engine.world.device)
            _moved(engine, whole, before.get(name, ()), after.get(name, ()))
    state.refresh(engine.optimizer, engine.data.units)
    return wanted


def balanced(loads: Sequence[int], ranks: int) -> Placement:
    """The experts of each rank, as many on each, so that ranks have about the same load.

    The busiest expert first, each to the rank with the least load that has room (Graham's rule).
    """
    room = len(loads) // ranks
    placed: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted(range(len(loads)), key=lambda e: (-loads[e], e)):
        free = [r for r in range(ranks) if len(placed[r]) < room]
        placed[min(free, key=lambda r: (sum(loads[e] for e in placed[r]), r))].append(expert)
    return tuple(tuple(sorted(experts)) for experts in placed)


def _by_load(engine: Engine, layers: Mapping[str, MoE]) -> dict[str, Placement]:
    loads = engine.sharded.of(ExpertLayout).loads
    if not layers:
        given = "place_experts before a training step of a model with sw.MoE layers"
        instead = 'engine.step(batch) first, or placement={"blocks.0.moe": [[0, 2], [1, 3]]}'
        raise bad(given, "the loads of a step, or a placement", instead)
    return {name: balanced(loads[name].computed, engine.plan.ep) for name in layers}


def _asked(
    layers: Mapping[str, MoE], placement: Mapping[str, Sequence[Sequence[int]]], ranks: int
) -> dict[str, Placement]:
    found: dict[str, Placement] = {}
    for name, by_rank in placement.items():
        experts = layers[name].gate.experts
        each = [list(own) for own in by_rank]
        right = len(each) == ranks and sorted(e for own in each for e in own) == [*range(experts)]
        if not right or any(len(own) != experts // ranks for own in each):
            raise bad(
                f"the placement {short_repr(by_rank)} of {experts} experts in {name}",
                f"{ranks} lists of {experts // ranks}, with every expert once",
                'placement={"blocks.0.moe": [[0, 2], [1, 3]]}',
            )
        found[name] = tuple(map(tuple, each))
    return found


def _stacks(engine: Engine, layers: Mapping[str, Placement]) -> dict[str, list[Box]]:
    """This rank's boxes of the stacked weights and of their states, by the name of the tensor."""
    shapes: dict[str, tuple[int, ...]] = {}
    found: dict[str, list[Box]] = {}
    stacks = tuple(f"{name}.experts." for name in layers)
    for box in engine.boxes():
        kind, _, name = box.name.partition("/")
        name = name.partition("/")[2] if kind == "optim" else name
        if kind == "buffer" or not name.startswith(stacks) or not box.shape:
            continue
        if shapes.setdefault(name, box.shape) != box.shape:
            given = f"place_experts with {box.name} of shape {box.shape}"
            allowed = "an optimizer whose states have the shape of the weight"
            raise bad(given, allowed, "optimizer=sw.AdamW(lr=3e-4)")
        found.setdefault(box.name, []).append(box)
    return found


def _relabel(engine: Engine, layer: MoE, stack: str, placement: Placement) -> None:
    """Let the layer and the layouts of its weights name other experts on each rank."""
    order = tuple(expert for own in placement for expert in own)
    layer.place = replace(layer.place, slots=order)
    ranges = tuple(tuple((expert, expert + 1) for expert in own) for own in placement)
    layout = AxisLayout.sharded(Cut(0, len(order), ranges))
    for flat in engine.flats:
        for index, name in enumerate(flat.names):
            if name.startswith(f"{stack}."):
                old = flat.layouts[index]
                axes = tuple((axis, layout if axis == EXPERTS else on) for axis, on in old.axes)
                flat.layouts[index] = replace(old, axes=axes)


def _moved(engine: Engine, whole: Tensor, before: Sequence[Box], after: Sequence[Box]) -> None:
    """Fill the boxes `after` with the values that the ranks have in the boxes `before`.

    `whole` is the tensor of which they are boxes, of zeros.
    """
    experts = engine.sharded.of(ExpertLayout)
    for box in before:
        block(whole, box.offsets, box.sizes).copy_(box.tensor)
    for axis in (experts.shard, experts.axis):
        whole = move(whole, axis, P, I)
    for box in after:
        box.tensor.copy_(block(whole, box.offsets, box.sizes))
