"""Shards the experts of a model over the axis `ep`, which divides the data ranks.

`ep` groups neighbours of the innermost data axis and shards the stacked weights of experts. On the
ranks that hold the same experts (`edp`, and `dp_replicate`) these weights follow the plan's row,
and their gradients are summed: an expert gets the tokens of its whole `ep` group. All other
parameters follow the row on the data axes. Without `ep` the layers still get the data axes, because
capacity and losses refer to the global batch.

On the tensor axis each rank has a part of the hidden features of every expert.

    E experts      D  width      F  hidden width, F / n of it on each of n ranks

    x [N, D] ─ enter ─┬─ router ─ gate ─────────────────────────── weights ─┐
                      └─ dispatch ─ up, gate [E, F / n, D] ─ down [E, D, F / n] ─ combine ─ leave

An expert is a column-parallel layer and then a row-parallel one (arXiv 1909.08053, section 3), and
the ranks compute the same routing. The output of a rank's experts is a partial sum, so the
gradients of the weights of the choices, and of the router behind them, are partial too: they are
summed with those of the router's weight, once a step. `leave` sums the outputs of the tokens, which
are fewer than the rows of the experts.

Under `sp` the layer's input is gathered along the sequence (the style "gather"), and `leave` gives
each rank its shard. Experts of transformers act on the shards themselves, with whole matrices.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from shardwise.comm.world import Axis, World
from shardwise.core.applied import Applied
from shardwise.core.errors import bad
from shardwise.core.layouts.layout import R
from shardwise.core.layouts.param_layout import AxisLayout
from shardwise.core.layouts.tensor_table import Style, general
from shardwise.core.layouts.uneven import Cut, even, packed
from shardwise.core.mesh import EXPERTS, REST
from shardwise.core.plan.plan import Plan
from shardwise.engine.batch import Count, data_axes, filled
from shardwise.engine.default_fill import agree, cut_to
from shardwise.techniques.expert.gates import PassRecords
from shardwise.techniques.expert.moe_layer import ExpertPlace, Experts, Load, MoE, identity
from shardwise.techniques.expert.routing import GlobalBatch, Routing
from shardwise.techniques.expert.stacked import (
    StackedOnRanks,
    experts_of,
    stacked_experts,
    width_of,
)
from shardwise.techniques.tensor.linear import Stream

if TYPE_CHECKING:
    from shardwise.engine.options import Build


@dataclass
class ExpertLayout(Applied):
    """A model on the axis of experts.

    shard, replicate  axes that shard and replicate the states of experts, instead of the data axes
    mixes             whether any stage of the pipeline has layers of experts
    loads             of this rank's layers in the last training step, by name
    """

    axis: Axis
    shard: Axis
    replicate: Axis
    mixes: bool = False
    loads: dict[str, Load] = field(default_factory=dict[str, Load])
    pass_records: list[PassRecords] = field(default_factory=list[PassRecords])  # of the layers
    stand_ins: list[Any] = field(default_factory=list)
    skips: bool = False  # whether a step whose logits are not finite is skipped, or raises
    absent: bool = False  # whether the current batch is a stand-in for one without rows
    count: Count | None = None  # the user's number of rows of a batch

    def axes(self) -> Iterable[Axis]:
        return self.axis, self.shard, self.replicate

    def begin(self, batch: Any, parts: Sequence[Any], *, trains: bool) -> Sequence[Any]:
        """Returns the parts with stand-ins for those without rows, whose tokens reach no expert."""
        if trains:
            self.loads.clear()
            self.end(trains=True)  # a step that raised left its passes
        whole = [filled(part, self.count) for part in parts]
        self.stand_ins = [now for now, part in zip(whole, parts, strict=True) if now is not part]
        return whole

    def end(self, *, trains: bool) -> None:
        self.stand_ins, self.absent = [], False
        for records in self.pass_records:
            records.end()

    def see(self, name: str, routing: Routing) -> None:
        if torch.is_grad_enabled():
            found, before = Load.of(routing), self.loads.get(name)
            self.loads[name] = found if before is None else before.plus(found)

    def enter(self, part: Any, model: nn.Module, own: Any) -> Any:
        self.absent = any(part is each for each in self.stand_ins)
        return part


def check_experts(model: nn.Module, plan: Plan) -> None:
    """Raise InputError if `plan` cannot distribute the experts of `model`."""
    if plan.ep > 1 and not experts_in(model):
        raise bad(
            f"'{plan}' for a {type(model).__name__} without a layer of experts",
            "epN for a model with sw.MoE layers, or with stacked experts of transformers",
            f"'{replace(plan, axes=plan.mesh.axes)}'",
        )
    for name, layer in layers_of(model).items() if plan.cp > 1 else ():
        gate = layer.gate
        if gate.capacity is not None or gate.name in ("gshard", "noisy-topk", "expert-choice"):
            raise bad(
                f"'{plan.context}' with the gate {gate.name} in {name}, which chooses by the "
                "order of tokens in whole rows",
                "gates such as topk and sigmoid, without a capacity",
                'gate = "topk" without a capacity, or no cp',
            )
    for name, experts in experts_in(model).items():
        if experts % plan.ep:
            raise bad(
                f"'ep{plan.ep}' with {experts} experts in {name}",
                f"a divisor of the experts and of the ranks of {plan.inner_data_axis}",
                f"ep{gcd(plan.ep, experts)}",
            )


def layers_of(model: nn.Module) -> dict[str, MoE]:
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def stacks_of(model: nn.Module) -> dict[str, nn.Module]:
    ours = {f"{name}.experts": layer.experts for name, layer in layers_of(model).items()}
    return ours | stacked_experts(model)


def experts_in(model: nn.Module) -> dict[str, int]:
    return {name: len(next(module.parameters())) for name, module in stacks_of(model).items()}


def layouts_of(model: nn.Module, ranks: int) -> dict[str, AxisLayout]:
    """The layouts of the stacked weights on an axis of `ranks` ranks, by name."""
    return {
        f"{name}.{key}": AxisLayout.sharded(even(0, len(p), ranks))
        for name, module in stacks_of(model).items()
        for key, p in module.named_parameters(recurse=False)
        if ranks > 1
    }


class ExpertLayer(NamedTuple):
    """The experts of a layer, and the width of its tokens."""

    experts: int
    width: int


def shapes_of(model: nn.Module) -> dict[str, ExpertLayer]:
    ours, stacks = layers_of(model).items(), stacked_experts(model).items()
    found = {name: ExpertLayer(layer.gate.experts, layer.width) for name, layer in ours}
    return found | {name: ExpertLayer(experts_of(m), width_of(m)) for name, m in stacks}


def applied(model: nn.Module, build: "Build") -> ExpertLayout:
    return lay_out(model, build.world, build.plan, build.options.rows)


def lay_out(model: nn.Module, world: World, plan: Plan, count: Count | None = None) -> ExpertLayout:
    """Shard the experts of `model` along `ep`, in place, and give the layers their axes."""
    data = data_axes(world, plan)
    shard, replicate = data
    inner, n = plan.inner_data_axis, plan.ep
    axis, rest = Axis(EXPERTS), world.axis(inner)
    if n > 1:
        ranks = world.axis(inner).size
        axis = world.within(inner, [range(g, g + n) for g in range(0, ranks, n)], EXPERTS)
        rest = world.within(inner, [range(e, ranks, n) for e in range(n)], REST)
        shard = rest if shard.name == inner else shard
        replicate = rest if replicate.name == inner else replicate
    layouts = layouts_of(model, n)
    layers = layers_of(model)
    layout = ExpertLayout(axis, shard, replicate, bool(layers or layouts))
    layout.count = count
    layout.pass_records.extend(layer.pass_records for layer in layers.values())
    batch = GlobalBatch((data[1], data[0]), world.counts)
    first = batch.rank - axis.rank
    calls = {"has_no_rows": lambda: layout.absent, "skips": lambda: layout.skips}
    for name, layer in layers.items():
        peers, see = tuple(range(first, first + n)), partial(layout.see, name)
        where = replace(layer.place, batch=batch, ep=axis, peers=peers, name=name, **calls)
        layer.place = replace(where, on_routing=see)
    for name, module in stacked_experts(model).items() if n > 1 else ():
        on_tensor = module.forward.place if isinstance(module.forward, StackedOnRanks) else None
        of = {"batch": GlobalBatch((axis,)), "ep": axis, "peers": tuple(range(n)), "name": name}
        place = replace(on_tensor or ExpertPlace(), **of, **calls)
        module.forward = StackedOnRanks(module, place)
    agree([p for name, p in model.named_parameters() if name in layouts], axis, world.device)
    cut_to(model, layouts, axis)
    return layout


# --- on the tensor axis ---------------------------------------------------------------------------


def _hidden_cuts(module: nn.Module, ranks: int) -> dict[str, Cut]:
    """The parts of stacked weights on the tensor axis: gate, up and down of sw.MoE, gate_up_proj
    [E, 2 F, D] and down_proj [E, D, F] of transformers. Other weights stay whole.
    """
    if isinstance(module, Experts):
        half = even(1, module.up.shape[1], ranks)
        return {"gate": half, "up": half, "down": even(2, module.up.shape[1], ranks)}
    own = {key: tuple(p.shape) for key, p in module.named_parameters(recurse=False)}
    both, down = own.get("gate_up_proj", ()), own.get("down_proj", ())
    if len(own) != 2 or len(both) != 3 or both != (down[0], 2 * down[2], down[1]):
        return {}
    half = even(1, down[2], ranks)
    return {"gate_up_proj": packed(1, [half, half]), "down_proj": even(2, down[2], ranks)}


def layouts_on_tensor_axis(model: nn.Module, ranks: int, *, sp: bool) -> dict[str, AxisLayout]:
    """The layouts on the tensor axis that no style of the table states, by name."""
    stacks = stacks_of(model)
    whole = stacked_experts(model) if sp else ()
    routers = {
        f"{name}.{key}.weight": AxisLayout(R, ranks)
        for name, layer in model.named_modules()
        if isinstance(layer, MoE)
        for key in ("router", "spread")
        if getattr(layer, key) is not None
    }
    return routers | {
        f"{name}.{key}": AxisLayout.sharded(cut)
        for name in stacks.keys() - whole
        for key, cut in _hidden_cuts(stacks[name], ranks).items()
    }


def on_tensor_axis(
    model: nn.Module, axis: Axis, stream: Stream, found: Mapping[str, AxisLayout], *, sp: bool
) -> None:
    """Let the layers of experts, whose weights are cut already, enter and leave the tensor axis."""
    for layer in model.modules():
        if isinstance(layer, MoE):
            enter = identity if sp else stream.spread  # what is gathered is used differently
            layer.place = replace(layer.place, enter=enter, leave=stream.leave, parts=axis.size)
    for name, module in stacked_experts(model).items():
        if f"{name}.down_proj" in found and found[f"{name}.down_proj"].cut:
            place = ExpertPlace(enter=stream.spread, leave=stream.leave, parts=axis.size)
            module.forward = StackedOnRanks(module, place)


def require_gathered(model: nn.Module, styles: Mapping[str, Style]) -> None:
    """Raise InputError if a layer of experts has not the whole sequence under `sp`."""
    for name, layer in model.named_modules():
        if isinstance(layer, MoE) and styles.get(name) != Style("gather"):
            pattern = general(name)
            raise bad(
                f"'sp' with {name}, whose tokens are numbered over the whole sequence",
                'the style "gather" in sequence, for every layer of experts',
                f'Table.of({{...}}, sequence={{"{pattern}": "gather", ...}})',
            )
