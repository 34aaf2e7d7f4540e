"""Plans of single layers in a model: the modules and parameters of each, and their tables.

Plan 0 has all modules that no pattern matches. A layer belongs to the first plan with a pattern
that matches it or a module around it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from shardwise.core.errors import bad
from shardwise.core.layouts.tensor_table import Table, matches
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.arguments import suggest
from shardwise.techniques.expert import apply as expert_parallel
from shardwise.wrap.wrap_policy import Rule, blocks, runs


@dataclass(frozen=True)
class Layers:
    """The outermost `modules` of one plan; `mesh` says whether its axes are a mesh of their own."""

    number: int
    plan: Plan
    mesh: bool
    modules: tuple[str, ...]
    table: Table | None = None

    def holds(self, name: str) -> bool:
        return any(name == module or name.startswith(f"{module}.") for module in self.modules)


@dataclass(frozen=True)
class LayerPlans:
    """All plans of single layers of a model."""

    layers: tuple[Layers, ...] = ()

    @property
    def meshes(self) -> tuple[Layers, ...]:
        return tuple(each for each in self.layers if each.mesh)

    def outside(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if not any(each.holds(name) for each in self.meshes)]

    def alone(self, model: nn.Module, rule: Rule) -> list[str]:
        """The layers that are units although they lie inside a block."""
        inside = [f"{name}." for name in blocks(model, rule)] if self.layers else []
        names = [name for each in self.layers for name in each.modules]
        return [name for name in names if any(map(name.startswith, inside))]


def layer_plans(model: nn.Module, plan: Plan) -> LayerPlans:
    """The layers of each plan of `plan.layers`, without their tables."""
    found: list[Layers] = []
    for number, layer in enumerate(plan.layers, 1):
        names = [name for name, _ in model.named_modules() if name]
        for pattern in layer.unmatched(names):
            raise bad(
                f"the layers {pattern} in the plan '{plan}', which do not all match a module of "
                f"the {type(model).__name__}",
                f"names of its modules, as {', '.join(names[:6])}, and patterns of them",
                f"'{suggest(pattern, names)}: {layer.words}'",
            )
        taken = [name for each in found for name in each.modules]
        own = _outermost(model, [name for name in names if layer.matches(name)])
        own = [name for name in own if name not in taken]
        if not own:
            raise bad(
                f"'{layer}' in the plan '{plan}', whose layers all have an earlier plan",
                "layers that no pattern before matches; the first plan applies",
                "the narrower patterns first",
            )
        for name, other in ((a, b) for a in own for b in taken):
            if f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."):
                raise bad(
                    f"the plan '{plan}', in which the layer {name} has one plan and {other} "
                    "another, and one is inside of the other",
                    "layers that do not contain each other",
                    f"a plan of {name} or of {other} alone",
                )
        of = plan.of_layers(number)
        found.append(Layers(number, of, layer.has_axes, tuple(own)))
    plans = LayerPlans(tuple(found))
    _require_untied(model, plan)
    _require_no_experts(model, plans)
    return plans


def require_units(units: Mapping[str, Sequence[str]], plan: Plan) -> None:
    """Raise InputError for a unit with parameters of layers of several plans: a module with its own
    parameters is one unit with all modules inside that are no blocks. `units`: their parameters.
    """
    for unit, names in units.items() if plan.layers else ():
        by_plan = {plan.layer_of(name): name for name in names}
        if len(by_plan) > 1:
            first, second, *_ = by_plan.values()
            raise bad(
                f"the plan '{plan}', in which {first} and {second} have different plans, and are "
                f"in one unit, {unit or 'the model'}, which has parameters of its own",
                "layers that are units, or lie in blocks: units= chooses the blocks",
                "units=LayerClass, or one plan for both",
            )


def only(table: Table, known: Sequence[str]) -> Table:
    """The entries of a table for the modules `known`."""
    styles = tuple((name, str(style)) for name, style in matches(table, known, sp=False).items())
    sets = tuple(
        (name, numbers)
        for pattern, numbers in table.sets
        for name in matches(Table.of({pattern: "whole"}), known, sp=False)
    )
    return replace(table, styles=styles, sequence=(), sets=sets)


def _outermost(model: nn.Module, names: Sequence[str]) -> list[str]:
    """The outermost of these modules; of a list, which is never called, the modules in it."""
    found: list[str] = []
    for name in names:
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        module = model.get_submodule(name)
        if runs(module):
            found.append(name)
        else:
            found += _outermost(model, [f"{name}.{child}" for child, _ in module.named_children()])
    return list(dict.fromkeys(found))


def _require_untied(model: nn.Module, plan: Plan) -> None:
    users: dict[nn.Parameter, dict[int, str]] = defaultdict(dict)
    for name, p in model.named_parameters(remove_duplicate=False):
        users[p].setdefault(plan.layer_of(name), name)
    for by_plan in users.values():
        if len(by_plan) > 1:
            first, second, *_ = by_plan.values()
            words = plan.layers[max(by_plan) - 1].words
            layers = [name.rpartition(".")[0] for name in (first, second)]
            raise bad(
                f"the plan '{plan}', with different plans for {first} and {second}, one parameter",
                "one plan for all layers that share a parameter",
                f"'{','.join(layers)}: {words}'",
            )


def _require_no_experts(model: nn.Module, plans: LayerPlans) -> None:
    for name in expert_parallel.experts_in(model) if plans.meshes else ():
        if any(each.holds(name) for each in plans.meshes):
            raise bad(
                f"the layer of experts {name} in a layer with a mesh of its own",
                "experts on the data ranks of the model's own plan",
                "patterns that leave out the layers of experts",
            )
