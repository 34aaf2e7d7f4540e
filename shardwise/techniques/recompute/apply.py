"""Recomputation in an engine: which modules it recomputes, and where activations rest."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import ge
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm.tiers.arena import Arena
from shardwise.comm.unchanged import generators_of
from shardwise.comm.world import World
from shardwise.core.applied import Applied
from shardwise.core.buffer_sizes import Slots
from shardwise.core.errors import bad
from shardwise.core.mesh import TENSOR
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.tree import leaves
from shardwise.techniques.expert.apply import layers_of
from shardwise.techniques.layers.plans import layer_plans
from shardwise.techniques.recompute import choice
from shardwise.techniques.recompute.checkpointed import NONE, Recomputed
from shardwise.techniques.recompute.host_activations import HostActivations
from shardwise.techniques.recompute.kept import Generators
from shardwise.wrap.wrap_policy import Rule, blocks

if TYPE_CHECKING:
    from shardwise.engine.options import Build

#: The shapes and the element types of the tensors in a batch.
Shapes = tuple[tuple[torch.Size, torch.dtype], ...]
#: Shapes of batches that have a prediction each.
KEPT: Final = 32


def recomputed_modules(
    model: nn.Module, plan: Plan, units: Rule = "auto", starts: Sequence[str] = ()
) -> dict[str, str]:
    """The modules that the plan recomputes, by name; `starts` begin the stages of a pipeline."""
    kinds = choice.chosen(model, plan.recompute, blocks(model, units) if plan.recompute else {})
    kinds = _with_layers(model, plan, units, kinds)
    _require_one_stage(kinds, starts, f"recompute:{plan.recompute}, which recomputes")
    return kinds


def _require_one_stage(names: Iterable[str], starts: Sequence[str], what: str) -> None:
    for name in names:
        inside = choice.first_inside(name, starts)
        if inside is not None:
            given = f"{what} {name}, with a stage that begins inside of it at {inside}"
            raise bad(given, "modules inside one stage", f"a stage that begins at {name}")


def _with_layers(
    model: nn.Module, plan: Plan, units: Rule, kinds: dict[str, str]
) -> dict[str, str]:
    plans = layer_plans(model, plan)
    if not plans.layers:
        return kinds
    kinds = {name: kind for name, kind in kinds.items() if not plan.layer_of(name)}
    for each in plans.layers:
        inside = {name: module for name, module in blocks(model, units).items() if each.holds(name)}
        own = inside or {name: model.get_submodule(name) for name in each.modules}
        found = choice.chosen(model, each.plan.recompute, own)
        kinds |= {name: kind for name, kind in found.items() if each.holds(name)}
    for name in kinds:
        inner = choice.first_inside(name, (n for each in plans.meshes for n in each.modules))
        if inner is not None:
            raise bad(
                f"recomputation of {name}, which contains the layer {inner} with a mesh of its own",
                "recomputation of that layer, or of modules beside it",
                f"'{inner}: ... recompute:full' after |",
            )
    return kinds


def on_host(
    model: nn.Module, plan: Plan, units: Rule, kinds: Mapping[str, str], starts: Sequence[str] = ()
) -> dict[str, tuple[int, int]]:
    """The blocks whose activations rest in host memory, each with its stage and its place."""
    if not plan.activations_on_host:
        return {}
    found = choice.on_host(model, plan, blocks(model, units), kinds)
    _require_one_stage(found, starts, "activations:host, which moves the activations of")
    order = [name for name, _ in model.named_modules(remove_duplicate=False)]
    begins = sorted(order.index(start) for start in starts)
    places = ((name, order.index(name)) for name in found)
    return {name: (sum(begin <= place for begin in begins), place) for name, place in places}


def applied(model: nn.Module, build: "Build") -> "Recomputation":
    build.recompute.apply(model, build.world, build.plan)
    return build.recompute


class Foreseen(NamedTuple):
    """What is decided for a batch: the kinds of modules, and the slots for their inputs."""

    kinds: Mapping[str, str]
    slots: Slots


class Recomputation(Applied):
    """The recomputed modules of an engine.

    `foresee` decides for a batch; None: `kinds` holds for all, without an arena. `hosted` is the
    result of `on_host`; with `everything` all that these blocks keep rests there, else what
    recomputation keeps of them.
    """

    def __init__(
        self,
        kinds: Mapping[str, str],
        foresee: Callable[[Any], Foreseen] | None = None,
        hosted: Mapping[str, tuple[int, int]] | None = None,
        *,
        everything: bool = True,
    ) -> None:
        self.kinds, self.foresee = kinds, foresee
        self.hosted, self.everything = hosted or {}, everything
        self.arena, self.device = Arena(), torch.device("cpu")
        self.modules: dict[str, Recomputed] = {}
        self.known: dict[Shapes, Foreseen] = {}
        self.host: HostActivations | None = None

    def apply(self, model: nn.Module, world: World, plan: Plan) -> None:
        """Recompute the modules, in place; under `sp` their inputs are shards."""
        records = [layer.pass_records for layer in layers_of(model).values()]
        generators = Generators([*generators_of(world.device), *records])
        tensor = world.axis(TENSOR)
        axis = None if plan.sp or tensor.size == 1 else tensor
        if self.hosted:
            self.host = HostActivations(model, world.tiers, self.hosted)
        self.arena, self.device = world.arenas.kept, world.storage
        keep = self.arena.keep if plan.arenas else None
        for name, kind in self.kinds.items():
            module = model.get_submodule(name)
            self.modules[name] = Recomputed(module, kind, generators, axis, self.host, keep)
        if self.host is not None:
            self.host.install(hooks=self.everything)

    def divided(self, model: nn.Module) -> None:
        """Release modules that `model` no longer contains: layers of a pipeline's other ranks."""
        own = set(model.modules())
        for name, module in list(self.modules.items()):
            if module.parts[0] not in own:
                self.modules.pop(name).release()

    def begin(self, batch: Any, parts: Sequence[Any], *, trains: bool) -> Sequence[Any]:
        """Raises InputError for a budget that is too small."""
        if trains and self.host is not None:
            self.host.begin(batch)
        if trains and self.foresee is not None:
            kinds, slots = self._foreseen(batch, self.foresee)
            self.set_kinds(kinds)
            self.arena.reserve(slots, self.device)
        return parts

    def set_kinds(self, kinds: Mapping[str, str]) -> None:
        self.kinds = {name: kind for name, kind in kinds.items() if kind != NONE}
        for name, module in self.modules.items():
            module.kind = kinds.get(name, NONE)

    def _foreseen(self, batch: Any, foresee: Callable[[Any], Foreseen]) -> Foreseen:
        """The result of `foresee`, which is slow, for a batch of these shapes. Once KEPT shapes are
        known, others get the result for a larger batch, which keeps more.
        """
        shapes = tuple((x.shape, x.dtype) for x in leaves(batch, Tensor, objects=True))
        if shapes not in self.known and len(self.known) == KEPT:
            near = (each for each in self.known if _has_room(each, shapes))
            shapes = min(near, key=_numel, default=shapes)
        found = self.known.pop(shapes) if shapes in self.known else foresee(batch)
        if len(self.known) == KEPT:
            del self.known[next(iter(self.known))]  # that of the longest ago
        self.known[shapes] = found
        return found


def _numel(shapes: Shapes) -> int:
    return sum(shape.numel() for shape, _ in shapes)


def _has_room(large: Shapes, small: Shapes) -> bool:
    """Whether a batch of `small` shapes is a part of one of `large` shapes, not half of it."""
    if len(large) != len(small) or _numel(large) > 2 * _numel(small):
        return False
    return all(
        dtype == other and len(shape) == len(part) and all(map(ge, shape, part))
        for (shape, dtype), (part, other) in zip(large, small, strict=True)
    )
