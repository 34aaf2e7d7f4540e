"""A model's parameters become units of flat parameters, with hooks that gather and reduce them."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.comm.tiers.arena import Arena
from shardwise.comm.tiers.disk import Disk
from shardwise.comm.tiers.tiers import Tiers
from shardwise.comm.world import Axis, World
from shardwise.core.applied import Fill
from shardwise.core.layouts.param_layout import Groups, Layout
from shardwise.core.tools.hook import Hook
from shardwise.core.tools.structure import plain_key, uncompiled
from shardwise.core.zero import Row
from shardwise.engine.checks import validate
from shardwise.engine.default_fill import fill_part, materialise
from shardwise.engine.precision import HALF, cast_inputs, param_dtypes
from shardwise.engine.rank_zero_weights import RankZeroWeights
from shardwise.flat.flat_parameter import Flat
from shardwise.flat.local_layout import LocalLayout
from shardwise.techniques.data.buffers import Buffers
from shardwise.techniques.data.consensus import Consensus
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.data.units import Pace, Unit, Units
from shardwise.wrap.wrap_policy import Rule, UnitSpec, choose

#: Neighbours smaller than this are one unit: below it a message costs more than what it carries.
LEAST_BYTES = 2**21


class UnitParts(Protocol):
    """How layers are divided (techniques/tile); what is not defined divides none."""

    @property
    def layers(self) -> Mapping[str, nn.Linear]:
        return {}

    def divided(self, specs: Sequence[UnitSpec]) -> list[UnitSpec]:
        """The units, with one for each part in place of that of its layer."""
        return list(specs)

    def plain(self, name: str) -> str:
        """The name of the model's parameter of which the parameter `name` is a part."""
        return name

    def place(self, name: str, /) -> dict[str, int]:
        """The coordinate of the parameter `name` on the axis of parts."""
        return {}

    def release(self, device: torch.device | None, /) -> None:
        """Free the parameters of the layers, whose values the parts have."""


class WholeUnits(UnitParts):
    """No layer is divided."""


@dataclass(frozen=True)
class Sharding:
    """How parameters are stored: the row, its data axes, and how units are chosen.

    device: where they are kept; None leaves them where they are.
    numbers: where the ranks keep numbers that they agree on; None: with the parameters.
    broadcast_buffers: whether every step begins with rank 0's buffers, or the first one only.
    tiers: of this rank, where the row keeps states in host memory.
    late: whether updates there are made beside the next step.
    arena: of this rank, for gradients until they are reduced.
    disk: of this rank, where the row keeps states on a disk.
    tiling: the linear layers that are gathered in tiles.
    gathers: whether units are gathered for use, under any plan of a layer.
    compute: the dtypes of parameters while they are used, where it is not their own.
    alone: layers with a plan of their own inside of blocks: units of their own.
    Neighbours smaller than `least_unit_bytes` (None: LEAST_BYTES) are one unit.
    fill(name, tensor) writes the initial weights of parameters on the meta device, unit by unit.
    weights: weights that rank 0 alone has, and that arrive after all units are built.
    number: of the engine or the wrapped module, in the order in which the program made them.
    """

    row: Row
    shard: Axis
    replicate: Axis
    units: Rule = "auto"
    bucket_bytes: int = 25 * 2**20
    fill: Fill | None = None
    device: torch.device | None = None
    numbers: torch.device | None = None
    broadcast_buffers: bool = True
    least_unit_bytes: int | None = None
    tiers: Tiers = field(default_factory=Tiers)
    late: bool = False
    arena: Arena = field(default_factory=Arena)
    disk: Disk | None = None
    tiling: UnitParts = field(default_factory=WholeUnits)
    gathers: bool = False
    alone: tuple[str, ...] = ()
    compute: Mapping[nn.Parameter, torch.dtype] = field(default_factory=dict)
    weights: RankZeroWeights = field(default_factory=RankZeroWeights)
    number: int = 0

    @property
    def axes(self) -> tuple[Axis, Axis]:
        return self.shard, self.replicate


def units_of(
    model: nn.Module,
    how: Sharding,
    parts: int = 1,
    unit_key: Callable[[UnitSpec], object] = lambda _: None,
) -> list[UnitSpec]:
    """The units of a model whose parameters will be sharded in about `parts` parts. Sizes are those
    of full parameters, so that ranks with slightly different parts choose the same.
    """
    # units that are gathered for use stay small; units that are only reduced may fill a bucket
    gathered = how.gathers or how.row.moves().reshards
    most = 2 * LEAST_BYTES if gathered else how.bucket_bytes
    least = LEAST_BYTES if how.least_unit_bytes is None else how.least_unit_bytes
    tiled = how.tiling.layers

    def apart(spec: UnitSpec) -> object:
        return unit_key(spec), spec.name if spec.name in tiled else None

    specs = choose(model, how.units, least * parts, most * parts, apart, (*tiled, *how.alone))
    return how.tiling.divided(specs)


@dataclass(frozen=True)
class Held:
    """How the ranks hold each parameter (core/layouts/layouts.py), and this rank's axes by name.

    sums   for an axis and groups of its ranks that sum gradients, the axis of this rank's group
    """

    layouts: Mapping[str, Layout]
    axes: Mapping[str, Axis]
    sums: Mapping[tuple[str, Groups], Axis] = field(default_factory=dict)

    def axis(self, name: str) -> Axis:
        return self.axes.get(name, Axis(name))

    @property
    def here(self) -> dict[str, int]:
        return {name: axis.rank for name, axis in self.axes.items()}

    def sums_of(self, layout: Layout) -> list[Axis]:
        """The axes, other than the data's, over which the gradient is summed."""
        found = [
            self.sums[axis, on.groups]
            for axis, on in layout.axes
            if any(len(group) > 1 for group in on.groups)
        ]
        return [axis for axis in found if axis.size > 1]


def by_row(how: Sharding, specs: Sequence[UnitSpec]) -> Held:
    shard, replicate = how.axes
    layout = Layout(how.row, shard.name, replicate.name)
    layouts = {name: layout for spec in specs for name, _ in spec.params}
    return Held(layouts, {shard.name: shard, replicate.name: replicate})


def shard(how: Sharding, specs: Sequence[UnitSpec], held: Held) -> list[Unit]:
    """Lay parameters flat, in place, one unit after the other: a meta model never exists whole."""
    given, here = how.weights.fill(how.fill), held.here

    def fill(name: str, tensor: Tensor) -> None:
        place = here | how.tiling.place(name)
        fill_part(given, how.tiling.plain(name), held.layouts[name], place, tensor)

    units: list[Unit] = []
    for spec in specs:
        groups: list[Flat] = []
        for group in _groups(spec, held.layouts, how.compute):
            first = group[0][0]
            layouts = [held.layouts[name] for name, _ in group]
            local = LocalLayout(
                layouts,
                held.axis(layouts[0].shard),
                held.axis(layouts[0].replicate),
                held.sums_of(layouts[0]),
                here | how.tiling.place(first),
                how.tiers,
                how.arena,
                how.late,
                how.disk,
                how.compute.get(group[0][1]),
            )
            device = how.device or group[0][1].device
            groups.append(Flat(group, local, fill, device))
            groups[-1].names = [plain_key(how.tiling.plain(name)) for name, _ in group]
            how.weights.expect(groups[-1], [name for name, _ in group], fill)
        units.append(Unit(spec.name, spec.modules, groups))
    how.tiling.release(how.device)
    return units


def flats_of(units: Sequence[Unit]) -> list[Flat]:
    return [group for unit in units for group in unit.groups]


def agreed(model: nn.Module, how: Sharding, units: Sequence[Unit]) -> Consensus:
    buffers = Buffers(model, how.axes, follow=how.broadcast_buffers)
    device = how.numbers or flats_of(units)[0].full.device
    modules = dict(model.named_modules())
    return Consensus(how.axes, flats_of(units), buffers, device, modules, how.number)


def hooked(
    model: nn.Module, how: Sharding, units: Sequence[Unit], pace: Pace, world: World | None = None
) -> Data:
    """Hook the modules of `model`, so that its units are gathered, freed and reduced in time."""
    return Data(model, Units(units), pace, agreed(model, how, units), world=world)


def sizes(units: Sequence[Unit]) -> dict[nn.Parameter, int]:
    """The number of elements of each parameter, or of this tensor rank's part of it."""
    return {
        p: shape.numel()
        for flat in flats_of(units)
        for p, shape in zip(flat.params, flat.shapes, strict=True)
    }


def layable(model: nn.Module, rule: Rule) -> None:
    """Raise the InputError that `shard` would raise, without changing the model."""
    if any(drivers(module) for module in model.modules()):
        raise validate.already_wrapped(model)
    choose(model, rule)


def drivers(module: nn.Module) -> list[Data]:
    """The owners of the hooks on `module` that gather and reduce parameters."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Hook)]
    found = dict.fromkeys(hook.driver for hook in hooks)
    return [driver for driver in found if isinstance(driver, Data) and driver.staged is None]


def driver_of(module: nn.Module) -> Data | None:
    """The Data of the module itself, not of a module inside it; None for a plain module."""
    roots = module, uncompiled(module)  # it may be compiled after it was wrapped
    return next((data for root in roots for data in drivers(root) if data.root is root), None)


def _groups(
    spec: UnitSpec, layouts: Mapping[str, Layout], compute: Mapping[nn.Parameter, torch.dtype]
) -> Sequence[Sequence[tuple[str, nn.Parameter]]]:
    """The unit's parameters by dtypes, whether they are trained, and the kind of their layout."""
    found: dict[Any, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, p in spec.params:
        alone = name if layouts[name].tied else ""
        found[p.dtype, compute.get(p), p.requires_grad, layouts[name].kind, alone].append((name, p))
    return list(found.values())


def cast_whole(
    model: nn.Module,
    dtype: torch.dtype | None,
    device: torch.device,
    fill: Fill | None = None,
    *,
    by_unit: bool = False,
) -> None:
    """Cast `model` to the plan's precision and move it to the device. Meta parameters stay, and
    with `by_unit` all: each unit is moved when it is laid out.
    """
    materialise(model, device, fill)
    if dtype is not None:
        cast_params(model, dtype)
    for p in model.parameters():
        if not (p.is_meta or by_unit):
            p.data = p.data.to(device)
    for b in model.buffers():
        b.data = b.data.to(device)
        if dtype is torch.float64 and b.is_floating_point():
            b.data = b.data.double()


def cast_params(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters, and inputs of layers if any has another dtype than before."""
    casts = dtype in HALF
    for p, own in param_dtypes(model, dtype):
        casts |= p.dtype is not own
        p.data = p.data.to(own)
    if casts:
        cast_inputs(model, dtype)
