"""Recomputation in an engine: which modules it recomputes, and where activations rest."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.comm.arena import Arena
from shardwise.comm.world import World
from shardwise.core.arena_slots import Slots
from shardwise.core.errors import bad
from shardwise.core.plan import Plan
from shardwise.engine.expert_parallel import layers_of
from shardwise.engine.layer_plans import layer_plans
from shardwise.engine.rng import generators_of
from shardwise.engine.tensor_layout import Tensors
from shardwise.parallel.data.wrap_policy import Rule, blocks
from shardwise.parallel.recompute import choice
from shardwise.parallel.recompute.checkpointed import NONE, Recomputed, recompute
from shardwise.parallel.recompute.generators import Generators
from shardwise.parallel.recompute.host import HostActivations

#: The shapes of batches whose choices are remembered, the oldest ones first forgotten.
MOST_SHAPES = 64

Choose = Callable[[Any], Mapping[str, str]]
Sizes = Callable[[Any], Slots]


def recomputed_modules(
    model: nn.Module, plan: Plan, units: Rule = "auto", starts: Sequence[str] = ()
) -> dict[str, str]:
    """The modules that the plan recomputes, by name; `starts` begin the stages of a pipeline.

    Raises InputError if no module matches, or one spans several stages.
    """
    kinds = choice.chosen(model, plan.recompute, blocks(model, units) if plan.recompute else {})
    kinds = _with_layers(model, plan, units, kinds)
    for name in kinds:
        inside = choice.first_inside(name, starts)
        if inside is not None:
            raise bad(
                f"recompute:{plan.recompute}, which recomputes {name}, with a stage that begins "
                f"inside of it at {inside}",
                "modules inside one stage",
                f"a stage that begins at {name}, or recompute:{inside}",
            )
    return kinds


def _with_layers(
    model: nn.Module, plan: Plan, units: Rule, kinds: dict[str, str]
) -> dict[str, str]:
    """The modules that the model's plan recomputes, and those of layers with a plan of their own.

    Raises InputError for a module that contains a layer with a mesh of its own.
    """
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
    """The blocks whose activations rest in host memory, each with its stage and its place in it.

    `kinds` is the result of `recomputed_modules`. Raises InputError if there are no blocks, or one
    begins in one stage and ends in another.
    """
    found = (
        choice.on_host(model, plan, blocks(model, units), kinds) if plan.activations_on_host else ()
    )
    for block in found:
        inside = choice.first_inside(block, starts)
        if inside is not None:
            raise bad(
                f"activations:host, which moves the activations of {block}, with a stage that "
                f"begins inside of it at {inside}",
                "blocks inside one stage",
                f"a stage that begins at {block}",
            )
    order = [name for name, _ in model.named_modules()]
    begins = sorted(order.index(start) for start in starts)
    places = ((name, order.index(name)) for name in found)
    return {name: (sum(begin <= place for begin in begins), place) for name, place in places}


class Recomputation:
    """The recomputed modules of an engine; a budget chooses them for each batch's shapes.

    `choose` gives the kinds of the modules for a batch, `sizes` the slots of the arena for their
    inputs; there is one or the other. `hosted` are the blocks of `on_host`; with
    `everything` all that they keep rests there, else only what recomputation keeps of them.
    """

    def __init__(
        self,
        kinds: Mapping[str, str],
        choose: Choose | None = None,
        hosted: Mapping[str, tuple[int, int]] | None = None,
        *,
        everything: bool = True,
        sizes: Sizes | None = None,
    ) -> None:
        self.kinds, self.choose = kinds, choose
        self.hosted, self.everything = hosted or {}, everything
        self.sizes, self.arena, self.device = sizes, Arena(), torch.device("cpu")
        self.modules: dict[str, Recomputed] = {}
        self.known: dict[object, Any] = {}
        self.host: HostActivations | None = None

    def apply(self, model: nn.Module, world: World, tensors: Tensors) -> None:
        """Recompute the activations of the modules, in place.

        Under sequence parallelism the inputs of modules are already shards.
        """
        records = [layer.pass_records for layer in layers_of(model).values()]
        generators = Generators([*generators_of(world.device), *records])
        whole = tensors.axis.size > 1 and not tensors.stream.split
        axis = tensors.axis if whole else None
        if self.hosted:
            self.host = HostActivations(model, world.tiers, self.hosted)
        self.arena, self.device = world.arenas.kept, world.device
        keep = None if self.sizes is None else self.arena.keep
        self.modules = recompute(model, self.kinds, generators, axis, self.host, keep)
        if self.host is not None:
            self.host.install(hooks=self.everything)

    def release(self, model: nn.Module) -> None:
        """Release modules that `model` no longer contains: layers of a pipeline's other ranks."""
        own = {id(module) for module in model.modules()}
        for name, module in list(self.modules.items()):
            if id(module.module()) not in own:
                self.modules.pop(name).release()

    def begin(self, batch: Any) -> None:
        """Begin a step on `batch`. Raises InputError for a budget that is too small."""
        if self.host is not None:
            self.host.begin(batch)
        find = self.choose or self.sizes
        if find is None:
            return
        shapes = tuple((x.shape, x.dtype) for x in tree_leaves(batch) if isinstance(x, Tensor))
        if shapes not in self.known:
            if len(self.known) == MOST_SHAPES:
                del self.known[next(iter(self.known))]
            self.known[shapes] = find(batch)
        if self.choose is None:
            self.arena.reserve(self.known[shapes], self.device)
            return
        self.kinds = self.known[shapes]
        for name, module in self.modules.items():
            module.kind = self.kinds.get(name, NONE)
